"""Our own operators beyond what the proof of their rules shows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autoparallel import operators
from autoparallel.comm.simulate import simulate
from tests.rules.examples import real, whole


def test_a_sum_of_losses_in_half_precision_does_not_overflow() -> None:
    x = torch.zeros(40_000, 8, dtype=torch.float16)
    target = whole(40_000, high=8)
    total = operators.cross_entropy_sum(x, target)
    assert total.dtype == torch.float32
    assert total / len(x) == pytest.approx(float(F.cross_entropy(x.float(), target)), rel=1e-3)

    def rank(index: int) -> Tensor:
        return operators.cross_entropy_sum_sharded(x.chunk(2, 1)[index], target, -100, "mesh/tp")

    assert [float(t) for t in simulate(rank, (2,), ("tp",))] == pytest.approx([float(total)] * 2, rel=1e-3)


@pytest.mark.parametrize("wrong", [-1, 12])
def test_an_index_outside_of_a_sharded_table_is_an_error_as_in_torch(wrong: int) -> None:
    weight, indices = real(12, 4), torch.tensor([3, wrong, 7])
    with pytest.raises(IndexError):
        F.embedding(indices, weight)
    with pytest.raises(IndexError):
        simulate(lambda rank: operators.embedding_sharded(weight.chunk(3)[rank], indices, -1, "mesh/tp"), (3,), ("tp",))


@pytest.mark.parametrize("wrong", [-1, 12])
def test_a_class_outside_of_sharded_logits_is_an_error_as_in_torch(wrong: int) -> None:
    x, target = real(3, 12), torch.tensor([3, wrong, 7])
    with pytest.raises((IndexError, RuntimeError)):
        F.cross_entropy(x, target)
    with pytest.raises((IndexError, RuntimeError)):
        simulate(
            lambda rank: operators.cross_entropy_sum_sharded(x.chunk(3, 1)[rank], target, -100, "mesh/tp"),
            (3,),
            ("tp",),
        )


def test_a_mean_over_no_target_has_a_gradient_of_zero_also_of_sharded_classes() -> None:
    x, target = real(3, 12), torch.full((3,), -100)

    def rank(index: int) -> Tensor:
        part = x.chunk(3, 1)[index].detach().requires_grad_()
        total = operators.cross_entropy_sum_sharded(part, target, -100, "mesh/tp")
        (total / 0).nan_to_num().backward()
        assert part.grad is not None
        return part.grad

    assert all(not grad.any() for grad in simulate(rank, (3,), ("tp",)))


class TestDropout:
    def _mask(self, state: operators.RandomState, number: int = 0, p: float = 0.3) -> Tensor:
        with operators.draw_from(state):
            return operators.dropout(torch.ones(60, 60), p, number)

    def test_masks_depend_on_seed_call_and_operator(self) -> None:
        base = self._mask(operators.RandomState(1, 1))
        assert torch.equal(base, self._mask(operators.RandomState(1, 1)))
        for seed, call, number in ((2, 1, 0), (1, 2, 0), (1, 1, 1)):
            other = self._mask(operators.RandomState(seed, call), number)
            assert 0.3 < ((base > 0) != (other > 0)).double().mean() < 0.55  # 2 p (1 - p) = 0.42 for independent masks

    def test_the_share_of_zeros_and_the_mean_are_right(self) -> None:
        mask = self._mask(operators.RandomState(3, 0))
        assert (mask == 0).double().mean() == pytest.approx(0.3, abs=0.03)
        assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
        assert not self._mask(operators.RandomState(3, 0), p=1.0).any()
