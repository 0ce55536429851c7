"""What need not be sent again: the traps. A transport's test class inherits this."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from raymod.calls import pack
from tests.transport.conformance import Link, MiB, digest, digest_of

EMBEDDINGS = 2 * MiB

Steps = Callable[..., int]


class UnchangedConformance:
    """Inherit, name the class `Test...`, and give a fixture `link`."""

    @pytest.fixture
    def steps(self, link: Link) -> Steps:
        """Sends a call, checks every bit of what arrives, and tells how many bytes were reused."""

        def step(*tensors: torch.Tensor) -> int:
            parcel = link.transport.send(pack(tensors, as_it_is=True))
            expected = [t.detach().resolve_conj().resolve_neg().contiguous() for t in tensors]
            for arrived in link.on_receivers(parcel, digest_of):
                assert arrived == digest(expected)
            return parcel.reused_bytes

        link.transport.forget()
        return step

    def test_what_has_not_changed_is_not_sent_again(self, steps: Steps) -> None:
        embeddings = torch.randn(EMBEDDINGS // 4)
        assert steps(torch.randn(1000, 64), embeddings) == 0
        for _ in range(3):
            assert steps(torch.randn(1000, 64), embeddings) == EMBEDDINGS
        # pipelines make the same content anew at every step
        assert steps(torch.randn(1000, 64), embeddings.clone()) == EMBEDDINGS
        assert (
            steps(torch.randn(1000, 64), torch.cat([embeddings[:7], embeddings[7:]])) == EMBEDDINGS
        )

    def test_a_new_prompt_of_equal_shape(self, steps: Steps) -> None:
        one, other = torch.randn(EMBEDDINGS // 4), torch.randn(EMBEDDINGS // 4)
        assert [steps(one), steps(other), steps(other)] == [0, 0, EMBEDDINGS]

    def test_edits_that_nothing_counts(self, steps: Steps) -> None:
        """Neither identity nor the version counter sees these; wherever in the tensor they are."""
        tensor = torch.zeros(EMBEDDINGS // 4)
        array = tensor.numpy()
        last = len(array) - 1
        steps(tensor)
        version = tensor._version
        for at in (0, 1, 1000, last // 2 + 99, last - 17, last):
            tensor.data[at] += 1
            assert steps(tensor) == 0
            array[at] += 1
            assert steps(tensor) == 0
            assert steps(tensor) == EMBEDDINGS
        assert tensor._version == version

    def test_edits_in_place_and_through_views(self, steps: Steps) -> None:
        tensor = torch.randn(1024, EMBEDDINGS // 4096)
        steps(tensor)
        for edit in (
            lambda: tensor.add_(1),
            lambda: tensor[5].mul_(2),
            lambda: tensor.view(-1)[-1:].zero_(),
            lambda: tensor.t()[3].copy_(tensor[0, 0]),
        ):
            edit()
            assert steps(tensor) == 0
            assert steps(tensor) == EMBEDDINGS

    def test_tensors_made_in_inference_mode_and_edited(self, steps: Steps) -> None:
        with torch.inference_mode():
            tensor = torch.randn(EMBEDDINGS // 4)
            steps(tensor)
            assert steps(tensor) == EMBEDDINGS
            tensor[77] = 5
            assert steps(tensor) == 0
            assert steps(tensor) == EMBEDDINGS

    def test_a_new_tensor_in_the_memory_of_an_old_one(self, steps: Steps) -> None:
        """It may have the same id, pointer, version and shape."""
        memory = torch.empty(EMBEDDINGS // 4)
        for n in range(5):
            tensor = memory[:].fill_(n)
            assert steps(tensor) == 0
            del tensor
            gc.collect()

    def test_bits_count_and_not_numbers(self, steps: Steps) -> None:
        zeros = torch.zeros(EMBEDDINGS // 4)
        steps(zeros)
        negative = zeros.clone()
        negative[99_999] = -0.0
        assert steps(negative) == 0
        nan = torch.full((EMBEDDINGS // 4,), float("nan"))
        assert [steps(nan), steps(nan)] == [0, EMBEDDINGS]
        same_bits_of_another_dtype = nan.view(torch.int32)
        assert steps(same_bits_of_another_dtype) == 0

    def test_a_lazy_view_is_not_taken_for_its_memory(self, steps: Steps) -> None:
        numbers = torch.complex(torch.randn(EMBEDDINGS // 8), torch.randn(EMBEDDINGS // 8))
        steps(numbers)
        assert steps(numbers.conj()) == 0
        assert steps(numbers.conj().imag) == 0

    def test_prompts_that_take_turns(self, steps: Steps) -> None:
        """The prompt and its negative, one call each at every step, with the same latents."""
        one, other = torch.randn(EMBEDDINGS // 4), torch.randn(EMBEDDINGS // 4)
        reused = []
        for _ in range(6):
            latents = torch.randn(1000, 64)
            reused += [steps(latents, one), steps(latents, other)]
        assert min(reused[-4:]) >= EMBEDDINGS

    def test_calls_of_two_kinds_that_take_turns(self, steps: Steps) -> None:
        one, other = torch.randn(EMBEDDINGS // 4), torch.randn(EMBEDDINGS // 8)
        reused = [(steps(one), steps(other)) for _ in range(4)]
        assert reused[-1] == (EMBEDDINGS, EMBEDDINGS // 2)
