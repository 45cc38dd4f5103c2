"""How others got the global norm wrong, one regression test for each way.

Gradients are written by hand (see ``test_norm``), so that nothing leans on a right backward. The mesh is (2, 2), and
the model's parameters lie in ``test_norm.LAYOUTS``: each sharded over axes of its own, unless a test says otherwise.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from autoparallel.placements import parse_layout
from autoparallel.runtime.norms.program import NormProgram
from tests.runtime.support import compiled_pair, mesh_of, off, raised, run_on_ranks, whole
from tests.runtime.test_norm import INF, LAYOUTS, NORMS, reference, with_gradients

HALVES = {"first": ["up.*", "norm.*"], "second": "down.*"}


def _of(gradients: dict[str, Tensor], prefix: tuple[str, ...]) -> dict[str, Tensor]:
    return {n: g for n, g in gradients.items() if n.startswith(prefix)}


def _stages() -> dict[str, Any]:
    model, gradients = with_gradients(torch.float64, 1.0)
    halves = model.grad_norm(groups=HALVES)
    total = reference(gradients, 2.0)
    limit = 0.5 * total
    norm = model.clip_grad_norm_(limit)
    ratios = [
        off(p.grad, gradients[n] * (limit / (total + 1e-6))) for n, p in model.named_parameters() if p.grad is not None
    ]
    return {
        "halves": [h.item() for h in halves.values()],
        "expected": [reference(_of(gradients, k), 2.0) for k in (("up", "norm"), ("down",))],
        "norm": norm.item() / total - 1,
        "off": max(ratios),
    }


def test_each_pipeline_stage_clips_by_the_norm_of_the_whole_model() -> None:
    """torchtitan#596. There are no stages yet: the analogue is two halves of a model that lie differently, whose own
    norms differ from the whole's, and which are scaled alike."""
    for found in run_on_ranks(_stages, world_size=4):
        assert found["halves"] == pytest.approx(found["expected"], rel=1e-12)
        assert abs(found["halves"][0] - found["halves"][1]) > 0.1, "the halves differ, or nothing is shown"
        assert abs(found["norm"]) < 1e-12 and found["off"] < 1e-12


def _tied() -> dict[str, float]:
    from tests.runtime.test_gradients import Tied, tied_batch, tied_loss

    results: dict[str, float] = {}
    for plan in ("fsdp", "tensor_parallel"):
        model, plain = compiled_pair(Tied, 2, 2, plan=plan, loss_fn=tied_loss)
        x, y = tied_batch(0)
        model(x, y).backward()
        tied_loss(plain(x), y).backward()
        for p in NORMS:
            expected = nn.utils.get_total_norm([q.grad for q in plain.parameters()], p)
            results[f"{plan} p={p:g}"] = off(model.grad_norm(p), expected)
        names = [n for n, _ in plain.named_parameters(remove_duplicate=False)]
        tied = {id(q): n for n, q in plain.named_parameters()}
        alias = next(n for n in names if n not in tied.values())
        own = dict(plain.named_parameters(remove_duplicate=False))[alias].grad
        results[f"{plan} by its other name"] = off(model.grad_norm(groups={"tied": alias})["tied"], own.norm())
        by_module = model.grad_norm(groups="module")
        for key in {n.split(".")[0] for n in names}:
            grads = {id(q): q.grad for n, q in plain.named_parameters(remove_duplicate=False) if n.startswith(key)}
            results[f"{plan} module {key}"] = off(by_module[key], nn.utils.get_total_norm(list(grads.values())))
    return results


@pytest.mark.wide
def test_a_tied_weight_is_not_counted_once_per_use() -> None:
    """Megatron-LM#7227, which counts it once per pipeline stage; here in one program, by either of its names."""
    for results in run_on_ranks(_tied, world_size=4):
        assert all(far < 1e-9 for far in results.values()), results


def _layouts() -> dict[str, Any]:
    """One parameter in every layout of the mesh, its gradient known."""
    model, gradients = with_gradients(torch.float64, 1.0)
    by_name = model.grad_norm(groups="parameter")
    return {n: (by_name[n].item(), reference({n: gradients[n]}, 2.0)) for n in LAYOUTS}


def test_weights_replicated_over_the_tensor_axis_count_once() -> None:
    """TransformerEngine#715, NeMo-RL#3788: norm layers and routers counted once per rank."""
    for found in run_on_ranks(_layouts, world_size=4):
        norm, expected = found["norm.weight"]  # I,I
        assert norm == pytest.approx(expected, rel=1e-12)


def test_the_replicate_axis_of_hsdp_is_not_in_the_sum() -> None:
    """VeOmni#184."""
    for found in run_on_ranks(_layouts, world_size=4):
        for name in ("up.bias", "norm.bias"):  # sharded over one axis, replicated over the other
            norm, expected = found[name]
            assert norm == pytest.approx(expected, rel=1e-12), LAYOUTS[name]


def _three_and_four() -> dict[str, Any]:
    model, _ = with_gradients(torch.float64, 0.0)
    parameters = dict(model.named_parameters())
    first, second = parameters["up.bias"], parameters["norm.weight"]  # I,S0 and I,I
    local = first.grad.to_local()
    local.zero_()[0] = 3.0 if mesh_of(2, 2).get_coordinate()[1] == 0 else 4.0
    shards = model.grad_norm().item()
    second.grad.to_local()[0] = 12.0
    return {"shards": shards, "both": model.grad_norm().item(), "inf": model.grad_norm(INF).item()}


def test_norms_of_shards_and_groups_are_neither_averaged_nor_added() -> None:
    """Megatron-LM#5916, DeepSpeed#8469: expert norms of 3 and 4 averaged to 3.5, dense and expert groups added. There
    are no experts yet: the analogue is a parameter of which each rank along one axis holds a part."""
    for found in run_on_ranks(_three_and_four, world_size=4):
        assert found == {"shards": pytest.approx(5.0), "both": pytest.approx(13.0), "inf": 12.0}


def _mixed() -> dict[str, Any]:
    results: dict[str, Any] = {}
    model, gradients = with_gradients(torch.float64, 1.0)
    results["layouts"] = len({tuple(p.placements) for p in model.parameters()})
    results["norm"] = model.grad_norm().item() / reference(gradients, 2.0) - 1
    parameter = dict(model.named_parameters())["up.weight"]
    parameter.grad = distribute_tensor(gradients["up.weight"], mesh_of(2, 2))  # replicated
    results["other placements"] = raised(lambda: model.clip_grad_norm_(1.0))
    return results


def test_parameters_that_lie_differently_are_measured_in_one_call() -> None:
    """pytorch#180346, accelerate#4219: an exception. What cannot be measured is refused before any collective."""
    for found in run_on_ranks(_mixed, world_size=4):
        assert found["layouts"] == 6 and abs(found["norm"]) < 1e-12
        assert found["other placements"].startswith("RuntimeError: clip_grad_norm_(): the gradient of up.weight was")
        assert "redistribute" in found["other placements"]


def _generator() -> dict[str, float]:
    model, gradients = with_gradients(torch.float64, 1.0)
    total = reference(gradients, 2.0)
    optimizer = torch.optim.SGD((p for p in model.parameters()), lr=0.1)  # torch makes a list of it
    optimizer.param_groups[0]["max_norm"] = 0.25 * total
    (norm,) = model.clip_grad_norm_(optimizer)
    factor = 0.25 * total / (total + 1e-6)
    results = {
        "norm": abs(norm.item() / total - 1),
        "clipped": max(off(p.grad, gradients[n] * factor) for n, p in model.named_parameters()),
    }
    model, _ = with_gradients(torch.float64, 1.0)
    nn.utils.clip_grad_norm_((p for p in model.parameters()), 0.25 * total)
    results["torch"] = max(off(p.grad, gradients[n] * factor) for n, p in model.named_parameters())
    return results


def test_a_generator_of_parameters_is_not_exhausted_by_the_norm() -> None:
    """torchtitan#1258. Ours takes no parameters; by an optimizer, and through torch's own function, all are clipped."""
    for found in run_on_ranks(_generator, world_size=4):
        assert all(far < 1e-12 for far in found.values()), found


def _copies() -> dict[str, Any]:
    model, gradients = with_gradients(torch.float64, 1.0)
    held = {n: (p.grad, p.grad.to_local()) for n, p in model.named_parameters()}
    before = {n: local.clone() for n, (_, local) in held.items()}
    model.clip_grad_norm_(0.25 * reference(gradients, 2.0))
    return {
        "same": all(p.grad is held[n][0] for n, p in model.named_parameters()),
        "ratio": max((local - 0.25 * before[n]).abs().max().item() for n, (_, local) in held.items()),
    }


def test_the_clip_is_applied_to_the_gradients_and_not_to_copies() -> None:
    """transformers#46113."""
    for found in run_on_ranks(_copies, world_size=4):
        assert found["same"] and found["ratio"] < 1e-6


def _powers() -> dict[str, float]:
    model, gradients = with_gradients(torch.float64, 1.0)
    return {f"p={p:g}": model.grad_norm(p).item() / reference(gradients, p) - 1 for p in NORMS}


def test_the_inf_norm_is_not_added_up_and_other_norms_are_not_squared() -> None:
    """torchtitan#649, DeepSpeed's get_grad_norm_direct. The analogue of stages is sets of parameters that lie over
    different axes."""
    for found in run_on_ranks(_powers, world_size=4):
        assert all(abs(far) < 1e-12 for far in found.values()), found


def _empty_shard(p: float) -> float:
    """Three rows on four ranks: the last has none."""
    from autoparallel.comm.groups import bind

    mesh = mesh_of(4)
    program = NormProgram({"w": parse_layout("S0")}, p, ("dp",), (4,), bind(mesh), [{"w"}])
    rows = torch.tensor([[1.0, -2.0], [5.0, 0.5], [0.25, 3.0]])
    mine = rows[dist.get_rank() : dist.get_rank() + 1]
    return float(program([mine]).item())


@pytest.mark.parametrize("p", [2.0, INF])
def test_an_empty_shard_does_not_raise_in_front_of_the_collective(p: float) -> None:
    """Measured with torch: the inf norm of 3 rows on 4 ranks raises on one, the others hang. Plans refuse fewer rows
    than ranks: so the program of the norm is run by itself."""
    found = run_on_ranks(_empty_shard, p, world_size=4)
    expected = reference({"": torch.tensor([1.0, -2.0, 5.0, 0.5, 0.25, 3.0])}, p)
    assert len(set(found)) == 1 and found[0] == pytest.approx(expected, rel=1e-6)


def _nan_on_one_rank() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in LAYOUTS:
        model, _ = with_gradients(torch.float32, 1.0)
        parameter = dict(model.named_parameters())[name]
        if dist.get_rank() == 3:
            parameter.grad.to_local().view(-1)[0] = math.nan
        refused = raised(lambda m=model: m.clip_grad_norm_(1.0, INF, error_if_nonfinite=True))
        results[name] = (refused, repr(model.grad_norm(INF).item()))
    return results


def test_a_nan_on_one_rank_does_not_disappear_in_the_inf_norm() -> None:
    """Measured: gloo's MAX drops a NaN."""
    seen = run_on_ranks(_nan_on_one_rank, world_size=4)
    assert all(rank == seen[0] for rank in seen)
    for name, (refused, norm) in seen[0].items():
        assert refused.startswith("RuntimeError") and norm == "nan", name


def _one_inf(policy: str) -> dict[str, Any]:
    model, gradients = with_gradients(torch.float32, 1.0)
    local = dict(model.named_parameters())["up.weight"].grad.to_local()
    if dist.get_rank() == 2:
        local.view(-1)[0] = INF
    error = raised(lambda: model.clip_grad_norm_(1.0, nonfinite=policy))
    others = {n: p.grad for n, p in model.named_parameters() if n != "up.weight"}
    return {
        "error": error,
        "unchanged": all(torch.equal(whole(g), gradients[n]) for n, g in others.items()),
        "all zero": all(bool((p.grad.to_local() == 0).all()) for p in model.parameters()),
        "nan": bool(local.isnan().any()),
    }


def test_one_infinite_gradient_does_not_silently_erase_the_others() -> None:
    """Measured with torch: the coefficient is 0, every other gradient becomes 0, that one NaN, no error. That is what
    ``propagate`` means, too; the other two policies are the ways out."""
    raising = run_on_ranks(_one_inf, "raise", world_size=4)
    assert all(r["error"].startswith("RuntimeError") and r["unchanged"] for r in raising), raising
    skipping = run_on_ranks(_one_inf, "skip", world_size=4)
    assert all(not r["error"] and r["all zero"] for r in skipping), skipping
    propagating = run_on_ranks(_one_inf, "propagate", world_size=4)
    assert all(not r["error"] and not r["unchanged"] for r in propagating), propagating
    assert propagating[2]["nan"]


def _narrow() -> dict[str, Any]:
    model, gradients = with_gradients(torch.bfloat16, 1.0)
    norm = model.grad_norm()
    return {"dtype": str(norm.dtype), "off": abs(norm.item() / reference(gradients, 2.0) - 1)}


def test_bf16_gradients_give_a_wide_norm() -> None:
    """Measured with torch: a bf16 norm, off by 1.3e-3."""
    for found in run_on_ranks(_narrow, world_size=4):
        assert found["dtype"] == "torch.float32" and found["off"] < 1e-6


def test_large_fp16_gradients_give_a_finite_norm() -> None:
    """Measured with torch: inf."""
    from autoparallel.runtime.norms import norm

    large = [torch.full((1000,), 6e4, dtype=torch.float16)]
    assert torch.stack(torch._foreach_norm(large)).isinf().all(), "or nothing is shown"
    assert norm.local_sum(large, 2.0).sqrt().item() == pytest.approx(6e4 * 1000**0.5, rel=1e-3)


def _overflow() -> list[float]:
    results = []
    for scale in (1e20, 1e-25):
        model, gradients = with_gradients(torch.float32, scale)
        results.append(abs(model.grad_norm().item() / reference(gradients, 2.0) - 1))
    return results


def test_the_square_does_not_overflow_float32_nor_vanish() -> None:
    """torchtitan's clip_grad_norm_ overflows above 1.8e19."""
    for found in run_on_ranks(_overflow, world_size=4):
        assert max(found) < 1e-6


def _without_a_gradient() -> dict[str, Any]:
    """One rank alone has lost the gradient of a replicated parameter."""
    import autoparallel

    model, gradients = with_gradients(torch.float64, 1.0)
    if dist.get_rank() == 3:
        dict(model.named_parameters())["norm.weight"].grad = None
    with autoparallel.count_traffic() as sent:
        norm = model.clip_grad_norm_(1e9)
    return {"norm": norm.item(), "expected": reference(gradients, 2.0), "sent": sent.total_collectives}


def test_a_rank_that_lacks_a_gradient_does_not_hang_the_others() -> None:
    """VeOmni#1086: a rank skips a parameter, and collectives no longer match. Ours are one, of the same size."""
    for found in run_on_ranks(_without_a_gradient, world_size=4):
        assert found["norm"] == pytest.approx(found["expected"], rel=1e-12) and found["sent"] == 1


def test_the_first_call_is_linear_in_the_parameters() -> None:
    """Measured with torch: 1000 DTensors take 6 s, 3000 take 33 s at the first call; pytorch#169445. Our program does
    not grow with their number."""
    texts = ["S0,I", "I,S0", "I,I", "S1,S0"]
    sizes = []
    for count in (10, 1000):
        layouts = {f"w{i}": parse_layout(texts[i % 4]) for i in range(count)}
        program = NormProgram(layouts, 2.0, ("dp", "tp"), (2, 2), "mesh0", [set(layouts)])
        assert sum(map(len, program.sets)) == count
        sizes.append(len(program.sets))
    assert sizes[0] == sizes[1]


def _traffic() -> dict[str, tuple[int, int]]:
    import autoparallel

    model, _ = with_gradients(torch.float64, 1.0)
    optimizer = torch.optim.SGD([{"params": [p], "max_norm": 1.0} for p in model.parameters()], lr=0.1)
    actions = {f"p={p:g}": lambda p=p: model.clip_grad_norm_(1e9, p) for p in NORMS}
    actions |= {
        "norm by parameter": lambda: model.grad_norm(groups="parameter"),
        "norm by module": lambda: model.grad_norm(INF, groups="module"),
        "norms that overlap": lambda: model.grad_norm(groups={"all": "*", "up": "up.*"}),
        "limits by pattern": lambda: model.clip_grad_norm_({"up.*": 1.0, "*": 0.5}),
        "limits of an optimizer": lambda: model.clip_grad_norm_(optimizer),
        "skip": lambda: model.clip_grad_norm_(1.0, nonfinite="skip"),
        "value": lambda: model.clip_grad_value_(0.1),
    }
    results = {}
    for name, action in actions.items():
        with autoparallel.count_traffic() as sent:
            action()
        results[name] = (sent.total_collectives, sent.total_bytes)
    return results


def test_the_norm_costs_one_all_reduce_and_value_clipping_none() -> None:
    """Measured with torch: two all-reduces on a (2, 2) mesh; elsewhere one per mesh axis, pipeline and expert group."""
    for found in run_on_ranks(_traffic, world_size=4):
        assert found.pop("value") == (0, 0)
        assert {count for count, _ in found.values()} == {1}, found
        assert found["p=2"][1] == 24, "two float64 numbers around a ring of four"
        assert max(size for _, size in found.values()) <= 24 * len(LAYOUTS), "two for each norm"


def test_nothing_waits_for_the_device() -> None:
    """Measured elsewhere: host synchronisations in the clip (torchtitan, Megatron-LM, Colossal-AI). On the meta device
    a value that is asked for is an error, and the program takes the way of every device that is not a CPU."""
    from autoparallel.runtime.norms import norm
    from tests.runtime.support import OneRank

    with pytest.raises(Exception, match="meta"):
        bool(torch.ones((), device="meta") > 0)
    for p in NORMS:
        layouts = {"w": parse_layout("S0"), "b": parse_layout("I")}
        program = NormProgram(layouts, p, ("dp",), (2,), "mesh0", [set(layouts)])
        with OneRank(size=2):
            norms = program(
                [torch.ones(100_000, device="meta"), torch.ones(4, device="meta", dtype=torch.bfloat16)],
                [torch.ones(4, device="meta")],
            )
        assert norms.is_meta and norms.shape == (1,) and norm.clip_coefficient(norms[0], 1.0).is_meta
