"""What ``torch.save`` writes of a compiled model's tensors, and who may read it."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autoparallel
from tests.runtime.support import batch, make, mesh_of, parameters_off, raised, run_on_ranks


def _compiled(plan: str) -> tuple[Any, torch.optim.Optimizer]:
    model = autoparallel.compile(make(), mesh_of(2), loss_fn=F.mse_loss, plan=plan)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(*batch(number)).backward()
    optimizer.step()


def _of_first_rank(content: bytes) -> bytes:
    """The file that the first rank has written."""
    shown: list[Any] = [content]
    dist.broadcast_object_list(shown)
    return shown[0]


def _go_on(saved_under: str, is_one: bool) -> tuple[float, str, list[str]]:
    """How far a run is off that goes on from a file under "fsdp", what reading raises, and warnings."""
    model, optimizer = _compiled(saved_under)
    _step(model, optimizer, 0)
    file = io.BytesIO()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    content = _of_first_rank(file.getvalue()) if is_one else file.getvalue()
    texts = sorted({str(x.message) for x in told})
    found: dict[str, Any] = {}
    error = raised(lambda: found.update(torch.load(io.BytesIO(content))))
    # What one rank cannot read, none goes on with.
    if _of_first_rank(error.encode()) or is_one and saved_under == "fsdp":
        return 0.0, error, texts
    other, others = _compiled("fsdp")
    other.load_state_dict(found["model"]), others.load_state_dict(found["optimizer"])
    for number in (1, 2):
        _step(model, optimizer, number), _step(other, others, number)
    whole: nn.Module = make()
    whole.load_state_dict({name: x.clone() for name, x in model.full_parameters()})
    return parameters_off(other, whole), error, texts


def test_a_file_of_each_rank_is_read_by_it() -> None:
    for rank, (difference, error, told) in enumerate(run_on_ranks(_go_on, "fsdp", False, world_size=2)):
        assert difference < 1e-12 and not error
        (text,) = told
        assert f"rank {rank} of 2 writes its own parts" in text and "model.save(path" in text


def test_what_lies_whole_is_read_by_all() -> None:
    """The first rank's file of a model under "data_parallel", by a model whose parameters are cut."""
    for difference, error, told in run_on_ranks(_go_on, "data_parallel", True, world_size=2):
        assert difference < 1e-12 and not error and not told


def test_parts_of_the_first_rank_are_not_those_of_others() -> None:
    first, second = run_on_ranks(_go_on, "fsdp", True, world_size=2)
    assert not first[1]
    assert "holds the part that rank 0 of 2 had of a tensor of shape" in second[1] and "rank 1 of 2 reads" in second[1]
    assert "model.save(path" in second[1]


def _copy_in_window() -> float:
    """How far copies of a plain model, of an optimizer and of gradients, made in a window, are off; a step after it."""
    model, optimizer = _compiled("fsdp")
    plain, off = model.up, []
    for window in model.accumulate(2, [batch(number) for number in range(2)]):
        for x, y in window:
            model(x, y).backward()
            copied, file = copy.deepcopy(plain), io.BytesIO()
            pairs = list(zip(copied.parameters(), plain.parameters(), strict=True))
            off += [float((a - b).abs().max()) for a, b in pairs]
            groups = copy.deepcopy(optimizer).param_groups
            assert all(a.grad is None for a in (*copied.parameters(), *groups[0]["params"]))  # as of a plain one
            grads = [p.grad for p in plain.parameters()]
            off += [float((a - b).abs().max()) for a, b in zip(copy.deepcopy(grads), grads, strict=True)]
            with warnings.catch_warnings(action="ignore"):
                torch.save([p.grad for p in plain.parameters()], file)
            loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
            off += [float((a - b.grad).abs().max()) for a, b in zip(loaded, plain.parameters(), strict=True)]
            assert all(a.to_local().data_ptr() != b.to_local().data_ptr() for a, b in pairs)
    return max(off)


def test_gradients_in_a_window_are_copied_and_saved() -> None:
    assert run_on_ranks(_copy_in_window, world_size=2) == [0.0, 0.0]
