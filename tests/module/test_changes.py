"""A change is made on the driver and on all ranks, or on none; and a new gang gets it again."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import nn

from raymod.errors import GangFailedError, RankError
from raymod.module import on_ranks
from raymod.module.undo import Snapshot
from tests import models
from tests.module.standin import Ranks, stub_of


class Both(nn.Module):
    """Parts of every kind that a change may touch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3).half()
        self.scales = {"a": 1.0}
        self.names = ["x"]
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scales["a"]


def state_of(module: nn.Module) -> Any:
    tensors = {n: (t.dtype, t.tolist()) for n, t in module.state_dict().items()}
    parts = {name: type(part).__name__ for name, part in module.named_modules()}
    hooks = {name: len(part._forward_hooks) for name, part in module.named_modules()}
    return tensors, parts, hooks, dict(module.scales), list(module.names), vars(module).keys()


def everything(module: Any, mark: Any = None) -> None:
    module.to(torch.bfloat16)
    module.scales["a"] = 2.0
    module.names.append("y")
    module.added = 5
    module.layer = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    module.other.register_forward_hook(lambda *_: None)
    module.eval()
    del module.table


def fails_on_the_second(module: Any, marks: list[str]) -> None:
    """Which rank it is shows in a mark that only the second one has."""
    everything(module)
    if hasattr(module, "second"):
        raise ValueError("no such adapter here")


@pytest.fixture
def pair() -> tuple[Any, Ranks]:
    stub, ranks = stub_of(Both(), 2)
    ranks.workers[1].module.__dict__["second"] = True
    return stub, ranks


def test_a_snapshot_brings_everything_back() -> None:
    module = Both()
    before, layer = state_of(module), module.layer
    snapshot = Snapshot(module)
    everything(module)
    assert state_of(module) != before
    snapshot.restore()
    assert state_of(module) == before
    assert module.layer is layer


def test_what_is_written_in_place_has_to_be_named() -> None:
    module = Both()
    for named, same in (([], False), ([module.layer.weight], True)):
        before = state_of(module)
        snapshot = Snapshot(module, named)
        with torch.no_grad():
            module.layer.weight.data += 1
        snapshot.restore()
        assert (state_of(module) == before) == same


def test_a_change_is_made_on_all_sides(pair: Any) -> None:
    stub, ranks = pair
    stub._change("change", everything)
    assert [state_of(w.module)[1:5] for w in ranks.workers] == [
        state_of(stub._raymod.original)[1:5]
    ] * 2
    assert stub.added == 5
    assert not hasattr(stub, "table")
    assert [worker.undo for worker in ranks.workers] == [None] * 2  # nothing is held on to


def test_if_one_rank_fails_all_are_as_before(pair: Any) -> None:
    stub, ranks = pair
    sides = [stub._raymod.original, *(worker.module for worker in ranks.workers)]
    before = [state_of(side) for side in sides]
    with pytest.raises(ValueError, match="no such adapter here") as caught:
        stub._change("change", fails_on_the_second, [])
    assert isinstance(caught.value, RankError)
    assert caught.value.rank == 1
    assert [state_of(side) for side in sides] == before
    assert not hasattr(stub, "added")
    assert ranks.failure is None
    assert not stub._raymod.sides.record.entries
    stub._change("change", everything)  # and goes on


def test_what_the_driver_cannot_do_costs_the_ranks_nothing(pair: Any) -> None:
    stub, ranks = pair
    before = state_of(stub._raymod.original)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        stub._change("change", getattr, "nothing_like_it")
    assert state_of(stub._raymod.original) == before
    assert ranks.sent_bytes < 100  # they were asked whether they live


def test_ranks_that_cannot_go_back_end_the_gang(pair: Any, monkeypatch: Any) -> None:
    stub, ranks = pair
    failures = [RuntimeError("out of memory")]
    monkeypatch.setattr(Snapshot, "restore", lambda self: raise_next(failures))

    def spoil(module: Any) -> None:
        if hasattr(module, "second"):
            raise ValueError("half done")

    with pytest.raises(GangFailedError, match="would differ") as caught:
        stub._change("change", spoil)
    assert "half done" in str(caught.value.__cause__)
    assert ranks.failure is caught.value


def raise_next(errors: list[Exception]) -> None:
    if errors:
        raise errors.pop()


def test_an_interrupted_change_is_taken_back_before_anything_else(pair: Any) -> None:
    stub, ranks = pair
    before = [state_of(worker.module) for worker in ranks.workers]
    call_all = ranks.call_all

    def interrupted(method: Any, *args: Any, **kwargs: Any) -> Any:
        if method is on_ranks.nothing:
            return call_all(method, *args, **kwargs)
        call_all(method, *args, **kwargs)
        ranks.call_all = call_all
        raise KeyboardInterrupt

    ranks.call_all = interrupted
    with pytest.raises(KeyboardInterrupt):
        stub._change("change", everything)
    assert state_of(ranks.module) != before[0]
    assert stub.scales == {"a": 1.0}
    with torch.no_grad():
        stub(torch.ones(1, 3))
    assert [state_of(worker.module) for worker in ranks.workers] == before


def test_a_call_waits_for_a_change(pair: Any) -> None:
    stub, ranks = pair
    entered, go = threading.Event(), threading.Event()
    order: list[str] = []

    def slow(module: Any) -> None:
        if module is stub._raymod.original:
            entered.set()
            go.wait(5)
            order.append("changed")

    change = threading.Thread(target=lambda: stub._change("change", slow))
    ranks.call_all = lambda method, *a, **k: [True] * 2 if "keep" in str(a) else []  # not packed
    change.start()
    assert entered.wait(5)

    def call() -> None:
        with torch.no_grad():
            stub(torch.ones(1, 3))
        order.append("called")

    caller = threading.Thread(target=call)
    caller.start()
    caller.join(0.2)
    assert order == []
    go.set()
    change.join(5)
    caller.join(5)
    assert order == ["changed", "called"]


@pytest.mark.parametrize("from_local", [True, False])
def test_a_new_gang_gets_all_changes_again(from_local: bool) -> None:
    module, _ = models.flux()
    stub, ranks = stub_of(module, 2, from_local=from_local)
    fresh = module if from_local else models.flux()[0]
    stub.out_channels = 3
    stub.out_channels = 7
    stub.to(torch.float64)
    stub._change("change", set_on_ranks_only, [1, 2], options={"local": False})
    names = [entry.group for entry in stub._raymod.sides.record.entries]
    assert names == ([""] if from_local else [".out_channels", "dtype", ""])
    rebuilt = Ranks(fresh, 2)
    rebuilt.on_rebuilt = ranks.on_rebuilt
    rebuilt.on_rebuilt(rebuilt)
    for worker in rebuilt.workers:
        assert worker.module.out_channels == 7
        assert worker.module.dtype == torch.float64
        assert worker.module.__dict__["ranks_only"] == [1, 2]
    assert not hasattr(module, "ranks_only")


def set_on_ranks_only(module: Any, value: Any) -> None:
    module.ranks_only = value


def test_the_record_keeps_what_was_given_not_what_became_of_it() -> None:
    stub, ranks = stub_of(Both(), 1, from_local=False)
    given = torch.zeros(3)
    stub._change("change", copy_into_table, given)
    given += 1
    rebuilt = Ranks(Both())
    ranks.on_rebuilt(rebuilt)
    assert rebuilt.module.table.tolist() == [0.0, 0.0, 0.0]


def copy_into_table(module: Any, values: torch.Tensor) -> None:
    module.table.copy_(values)


def test_adapters_that_are_gone_are_forgotten_unless_they_left_a_trace() -> None:
    from tests.module.sequences import flux, lora

    stub, _ = stub_of(flux(), 1, from_local=False)
    record = stub._raymod.sides.record
    for _ in range(3):
        stub.load_lora_adapter(lora(flux(), 1), adapter_name="a")
        stub.set_adapters("a", 0.5)
        stub.train()
        stub.eval()
        assert len(record.entries) == 3
        stub.unload_lora()
        assert [entry.group for entry in record.entries] == ["train"]
    stub.load_lora_adapter(lora(flux(), 1), adapter_name="a")
    stub.fuse_lora()
    stub.unload_lora()
    assert [entry.method for entry in record.entries][1:] == [
        "load_lora_adapter",
        "fuse_lora",
        "unload_lora",
    ]


class TestCacheContext:
    @pytest.fixture
    def flux(self) -> Any:
        module, make_inputs = models.flux()
        stub, ranks = stub_of(module.eval(), 2)
        inputs = make_inputs(1)

        def call() -> Any:
            with torch.no_grad():
                stub(**inputs)
            return ranks.contexts[-1]

        return stub, call

    def test_name_and_fields_travel_with_each_call(self, flux: Any) -> None:
        stub, call = flux
        assert call() == ()
        with stub.cache_context("cond", step_index=3, sigma=0.5):
            assert call() == (("cond", {"step_index": 3, "sigma": 0.5}),)
            assert call() == (("cond", {"step_index": 3, "sigma": 0.5}),)
        assert call() == ()

    def test_nested(self, flux: Any) -> None:
        stub, call = flux
        with stub.cache_context("outer"):
            with stub.cache_context("inner"):
                assert [name for name, _ in call()] == ["outer", "inner"]
            assert [name for name, _ in call()] == ["outer"]

    def test_an_exception_inside_leaves_it(self, flux: Any) -> None:
        stub, call = flux
        with contextlib.suppress(RuntimeError), stub.cache_context("cond"):
            raise RuntimeError
        assert call() == ()

    def test_each_thread_has_its_own(self, flux: Any) -> None:
        stub, call = flux
        found: list[Any] = []
        with stub.cache_context("mine"):
            other = threading.Thread(target=lambda: found.append(call()))
            other.start()
            other.join(10)
        assert found == [()]

    def test_a_module_without_one_gets_none(self) -> None:
        stub, _ = stub_of(nn.Linear(2, 2))
        assert not hasattr(stub, "cache_context")
