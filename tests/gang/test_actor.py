"""A rank's actor before it has a worker: what it imports, and what it tells when it cannot."""

from __future__ import annotations

import builtins
import gc
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raymod.gang.actor import RankActor
from raymod.transport import RayTransport

SEAT = {"rank": 0, "world_size": 1, "node": "here", "transport": RayTransport(timeout_s=1.0)}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    environ = dict(os.environ)
    yield
    gc.unfreeze()
    os.environ.clear()
    os.environ.update(environ)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that nobody has imported."""
    (tmp_path / "model_of_a_user.py").write_text("import gc\nCOLLECTS = gc.isenabled()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "model_of_a_user", raising=False)
    return "model_of_a_user"


def built(imports: tuple[str, ...] = ()) -> dict[str, Any]:
    actor = RankActor()
    actor.warm()
    return actor.build(pickle.dumps(SEAT), imports)


def test_the_models_code_is_imported_ahead(model: str) -> None:
    assert "info" in built((model,))
    assert sys.modules[model].COLLECTS is False  # garbage is not looked for meanwhile
    assert gc.isenabled()


def test_what_cannot_be_imported_ahead_is_left_to_the_load(model: str) -> None:
    assert "info" in built(("nowhere_to_be_found", model))
    assert model in sys.modules


def test_a_broken_import_is_told_as_it_first_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    real, tries = builtins.__import__, []

    def broken(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "raymod.worker":
            tries.append(name)
            raise ImportError("libfirst.so is missing", name="first")
        return real(name, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "__import__", broken)
        answer = built()
    assert tries == ["raymod.worker"]
    assert (answer["type_name"], answer["message"]) == ("ImportError", "libfirst.so is missing")
    assert (answer["is_import"], answer["module"]) == (True, "first")
    assert gc.isenabled()


def test_a_rank_without_a_module_has_no_skeleton() -> None:
    actor = RankActor()
    actor.build(pickle.dumps(SEAT), ())
    reply = actor.answer("skeleton")
    assert "call load first" in reply.failure.message
