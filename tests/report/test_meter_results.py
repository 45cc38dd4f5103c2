"""``predict.results``: what is looked up is what the operator makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autoparallel.predict.results import call_on_meta, kind_of

aten = torch.ops.aten


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    return call_on_meta(kind_of(func, args, kwargs), func, args, kwargs)


def _seen(value: Any) -> object:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (aten.add.Tensor, (_meta(4, 1), _meta(1, 3, dtype=torch.bfloat16)), {"alpha": 2}),
        (aten.add.Tensor, (_meta(4, 3).t(), _meta(4, 3).t()), {}),
        (aten.mul.Tensor, (_meta(2, dtype=torch.int64), 2), {}),
        (aten.mul.Tensor, (_meta(2, dtype=torch.int64), 2.0), {}),  # as equal as 2, and another dtype
        (aten.mul.Tensor, (_meta(2, dtype=torch.bool), True), {}),
        (aten.mul.Tensor, (_meta(2, dtype=torch.bool), 1), {}),
        (aten.mul.Tensor, (_meta(2), torch.tensor(2.0)), {}),  # a number that has a value
        (aten.cat.default, ([_meta(2, 3), _meta(4, 3)], 0), {}),
        (aten.new_empty.default, (_meta(2), [3, 5]), {"dtype": torch.float64}),
        (aten.topk.default, (_meta(8), 2), {}),  # several results
    ],
)
def test_a_result_is_what_the_operator_makes(func: Any, args: Any, kwargs: Any) -> None:
    for _ in range(2):  # the first call of its kind, and one that is looked up
        made, wanted = _call(func, args, kwargs), func(*args, **kwargs)
        assert torch.utils._pytree.tree_map(_seen, made) == torch.utils._pytree.tree_map(_seen, wanted)


def test_a_backward_that_torch_has_no_shapes_of_gives_what_is_like_its_input() -> None:
    x, target = _meta(4, 3), _meta(4, dtype=torch.int64)
    backward = aten.multi_margin_loss_backward.default
    with pytest.raises(NotImplementedError):
        backward(_meta(), x, target, 1, 1)
    assert _seen(_call(backward, (_meta(), x, target, 1, 1), {})) == _seen(x)
    with pytest.raises(NotImplementedError):
        _call(aten.masked_select.default, (x, x > 0), {})


def test_a_result_is_that_of_the_default_dtype() -> None:
    """Also of what is made of integers, and of numbers."""
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            assert _call(aten.div.Tensor, (_meta(2, dtype=torch.int64), 2), {}).dtype == dtype
            assert _call(aten.full.default, ([3], 1.0), {"device": torch.device("meta")}).dtype == dtype
        finally:
            torch.set_default_dtype(torch.float32)


@torch.library.custom_op("autoparallel_tests::gather_of", mutates_args=())
def gather_of(x: Tensor, group: str) -> Tensor:
    """As a collective: what it makes depends on who is in the group."""
    return x.repeat(SIZES[group])


gather_of.register_fake(lambda x, group: x.new_empty(SIZES[group] * x.shape[0]))
SIZES = {"dp": 2}


def test_a_result_that_depends_on_more_than_shapes_is_not_looked_up() -> None:
    for size in (2, 4):
        SIZES["dp"] = size
        assert _call(torch.ops.autoparallel_tests.gather_of.default, (_meta(3), "dp"), {}).shape == (3 * size,)


def test_what_is_no_new_tensor_is_never_looked_up() -> None:
    x = _meta(4, 4)
    for _ in range(2):
        assert _call(aten.view.default, (x, [16]), {}).untyped_storage()._cdata == x.untyped_storage()._cdata
        assert _call(aten.add_.Tensor, (x, 1), {}) is x
