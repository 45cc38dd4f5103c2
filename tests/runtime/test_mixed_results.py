"""What a pipeline's microbatches make of a whole batch: buffers that a call changes, and outputs beside the loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed import run_distributed
from tests.runtime.support import off, raised


class Mixed(nn.Module):
    """Its loss is made of rows; ``change`` changes a buffer, and returns None where nothing reads it; ``extra`` makes
    what is returned beside."""

    def __init__(self, change: Callable[[Any, Tensor], Any], extra: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.change, self.extra = change, extra
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        h = torch.tanh(self.up(x))
        h = h if self.change(self, h.detach()) is None else h * self.seen
        out = self.down(h)
        return (out, self.extra(out)) if y is None else {"loss": F.mse_loss(out, y), "extra": self.extra(out.detach())}


def _alone(out: Tensor) -> Tensor:
    return out * 2


BUFFERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "calls are counted": lambda m, h: (m.seen.add_(1), None)[1],
    "what is counted scales": lambda m, h: m.seen.mul_(2),
    "sums over rows": lambda m, h: (m.seen.add_(h.sum()), None)[1],
    "rows are counted": lambda m, h: (m.seen.add_(3 * h.shape[0]), None)[1],
    "elements are counted": lambda m, h: (m.seen.add_(h.numel()), None)[1],
}
REFUSED: dict[str, Callable[[Any, Tensor], Any]] = {
    "an average": lambda m, h: (m.seen.mul_(0.9).add_(0.1 * h.mean()), None)[1],
    "a mean": lambda m, h: (m.seen.add_(h.mean()), None)[1],
    "more than rows": lambda m, h: (m.seen.add_(2 * h.shape[0] + 1), None)[1],
    "the last batch": lambda m, h: (m.seen.copy_(h.square().sum()), None)[1],
}
OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": _alone,
    "centred": lambda out: out - out.mean(0),
    "flipped": lambda out: out.flip(0),
    "pairs of rows": lambda out: out @ out.T,
    "a half": lambda out: out[: out.shape[0] // 2],
    "numbered": lambda out: out + torch.arange(out.shape[0])[:, None],
    "no batch": lambda out: out.sum(0),
    "normed": lambda out: F.batch_norm(out, None, None, training=True),
}


def _results(part: slice) -> tuple[dict[str, float], dict[str, str | None]]:
    import autoparallel

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def pair(change: Any, extra: Any, **options: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        plain = Mixed(change, extra).double()
        return plain, autoparallel.compile(copy.deepcopy(plain), mesh, **options)

    worst: dict[str, float] = {}

    def some(table: dict[str, Any]) -> list[tuple[str, Any]]:
        return list(table.items())[part]

    for name, change in some(BUFFERS):
        plain, model = pair(change, _alone)
        losses = [m(x, y)["loss"] for _ in range(2) for m in (plain, model)]
        with torch.no_grad():
            outs = [m(x)[0] for m in (plain, model)]
        worst[name] = max(off(*losses[:2]), off(*losses[2:]), off(*outs), off(plain.seen, model.seen))
    for name, extra in some(OUTPUTS):
        plain, model = pair(lambda m, h: None, extra)
        off_loss = off(model(x, y)["loss"], plain(x, y)["loss"])
        with torch.no_grad():
            worst[name] = max(off_loss, *map(off, model(x), plain(x)))
    refused = {
        name: raised(lambda change=change: pair(change, _alone)[1](x, y))  # type: ignore[misc]
        for name, change in some(REFUSED)
    }
    for name in ("centred", "pairs of rows")[part]:
        refused[name] = raised(
            lambda name=name: pair(lambda m, h: None, OUTPUTS[name], outputs="gather")[1](x, y)  # type: ignore[misc]
        )
    hooked = {
        "of a module": lambda m: m.down.register_full_backward_hook(lambda module, before, after: (before[0],)),
        "of a tensor": lambda m: m.up.register_forward_hook(_hook),
    }
    for name, add in some(hooked):
        torch.manual_seed(0)
        plain = Mixed(lambda m, h: None, _alone).double()
        add(plain)
        refused[name] = raised(lambda plain=plain: autoparallel.compile(plain, mesh)(x, y))
    return worst, refused


def _hook(module: nn.Module, args: Any, out: Tensor) -> None:
    out.register_hook(lambda grad: grad / grad.norm())


@pytest.mark.wide
@pytest.mark.slow_where(lambda start: start > 1)
@pytest.mark.parametrize("start", range(4))
def test_microbatches_make_what_the_batch_does_or_are_refused(start: int) -> None:
    for worst, refused in run_distributed(_results, slice(start, None, 4), world_size=2):
        assert max(worst.values()) < 1e-12, worst
        for name, text in refused.items():
            what = "the buffer seen otherwise" if name in REFUSED else "is not what microbatches make"
            what = "a hook is given the gradient of each microbatch" if name.startswith("of a") else what
            assert text is not None and text.startswith("PlanError") and what in text, (name, text)
