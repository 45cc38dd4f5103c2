"""Attention on meta tensors runs the operators that a CPU runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autoparallel.predict.attention import attention


class Recording(TorchDispatchMode):
    """Notes the operators and the sizes of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [x for x in (made if isinstance(made, tuple) else (made,)) if isinstance(x, torch.Tensor)]
        self.calls.append((func._schema.name, [(x.shape, x.stride(), x.dtype) for x in tensors]))
        return made


def recorded(device: str, run: Any, mask: torch.dtype | None, learned: bool, again: bool, **options: Any) -> Any:
    q, k, v = (torch.zeros(2, 4, rows, 8, device=device, requires_grad=True) for rows in (6, 5, 5))
    given = None if mask is None else torch.ones(6, 5, device=device, dtype=mask).requires_grad_(learned)
    with Recording() as recording:
        kept = {"use_reentrant": False} if again else {}
        out = (partial(checkpoint, run) if again else run)(q, k, v, given, **kept, **options)
        out.backward(torch.empty_like(out))
    return recording.calls


@pytest.mark.parametrize("again", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize(
    ("mask", "learned", "options", "fused"),
    [
        (None, False, {}, True),
        (None, False, {"is_causal": True, "scale": 0.5}, True),
        (torch.bool, False, {}, True),
        (torch.float32, False, {}, True),
        (torch.float32, True, {}, False),
    ],
    ids=["plain", "causal", "truth values", "numbers", "learned"],
)
def test_a_cpu_and_meta_tensors_run_the_same(
    mask: torch.dtype | None, learned: bool, options: dict[str, Any], fused: bool, again: bool
) -> None:
    theirs = recorded("cpu", torch.nn.functional.scaled_dot_product_attention, mask, learned, again, **options)
    ours = recorded("meta", attention, mask, learned, again, **options)
    assert ours == theirs
    assert fused == any("flash" in name for name, _ in ours)
