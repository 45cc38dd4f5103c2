"""Bad input is the same clear error on every rank, before any collective, and nothing is lost by it.

Each case makes one mistake, on two ranks, and then a correct call on the same model: its gradients must be those of
one process, which shows that nobody waits in a collective and that the mistake left no trace.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import autoparallel
from autoparallel.runtime.calls.exchange import CHECKED_CALLS
from tests.distributed import run_distributed
from tests.runtime.support import (
    Net,
    batch,
    compiled_pair,
    gradients_off,
    make,
    mesh_of,
    parameters_off,
    raised,
    run_on_ranks,
)

Results = dict[str, tuple[str, float]]
"""What each case raised on a rank, and how far the correct call after it is from one process."""


def check(ranks: list[Results], name: str, *patterns: str) -> None:
    """Every rank said the same kind of thing, and the correct call after it worked."""
    results = [rank[name] for rank in ranks]
    for rank, (message, difference) in enumerate(results):
        assert message, f"rank {rank} raised nothing"
        for pattern in patterns:
            assert re.search(pattern, message), f"rank {rank} said: {message}\nwithout: {pattern}"
        assert difference < 1e-12, f"rank {rank}: the call after the error is off by {difference}; it was {message}"
    kinds = {message.partition(":")[0] for message, _ in results}
    assert len(kinds) == 1, f"ranks raised different errors: {results}"


def correct_call(model: Any, plain: nn.Module) -> float:
    """How far loss and gradients of an ordinary step are from one process."""
    model.train(), plain.train()
    model.zero_grad(), plain.zero_grad()
    x, y = batch(7)
    loss = model(x, y)
    loss.backward()
    expected = F.mse_loss(plain(x), y)
    expected.backward()
    return max(abs(loss.item() - expected.item()), gradients_off(model, plain))


# --------------------------------------------------------------------------------------------------- before compiling


def _compile_badly() -> Results:
    import autoparallel

    rank = dist.get_rank()
    mesh = mesh_of(2)
    known, plain = compiled_pair(plan="fsdp")

    def compile(used: Any = None, on: Any = mesh, **options: Any) -> None:
        autoparallel.compile(used or make(Net), on, loss_fn=F.mse_loss, **options)

    actions: dict[str, Callable[[], Any]] = {
        "mesh larger than the world": lambda: compile(on=_unready_mesh("cpu", 4)),
        "no axis names": lambda: compile(on=init_device_mesh("cpu", (2, 1))),
        "no pipeline axis": lambda: compile(pipeline=autoparallel.Pipeline("1f1b")),
        "not a pipeline": lambda: compile(pipeline="1f1b"),
        "four axes": lambda: compile(on=init_device_mesh("cpu", (2, 1, 1, 1), mesh_dim_names=tuple("abcd"))),
        "another device": lambda: compile(on=_unready_mesh("meta", 2)),
        "a buffer elsewhere": lambda: compile(used=_WithBuffer()),
        "unknown plan": lambda: compile(plan="fspd"),
        "unknown outputs": lambda: compile(outputs="whole"),
        "unknown backend": lambda: compile(backend="jit"),
        "not a plan": lambda: compile(plan=3),
        "not a module": lambda: compile(used=F.relu),
        "not a mesh": lambda: compile(on=(2,)),
        "compiled already": lambda: compile(used=known),
        "compiled already, the plain one": lambda: compile(used=known._plain),
        "wrapped": lambda: compile(used=nn.parallel.DistributedDataParallel(make(Net))),
        "another model on a rank": lambda: compile(used=Net(hidden=8 + 8 * rank).double()),
        "another name on a rank": lambda: compile(used=nn.Sequential(Net()) if rank else Net()),
        "another dtype on a rank": lambda: compile(used=make(Net, torch.float64 if rank else torch.float32)),
        "frozen on a rank only": lambda: compile(used=make(Net).requires_grad_(rank == 0)),
        "another plan on a rank": lambda: compile(plan="fsdp" if rank else "data_parallel"),
        "another memory limit on a rank": lambda: compile(memory_limit=1e9 if rank else None),
        "other outputs on a rank": lambda: compile(outputs="gather" if rank else "auto"),
    }
    return {name: (raised(action), correct_call(known, plain)) for name, action in actions.items()}


def _unready_mesh(device: str, ranks: int) -> DeviceMesh:
    return DeviceMesh(device, torch.arange(ranks), mesh_dim_names=("dp",), _init_backend=False, _rank=dist.get_rank())


class _WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("table", _unreachable(torch.zeros(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class _Elsewhere(Tensor):
    """A tensor that says it is on a device which this machine does not have."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def _unreachable(x: Tensor) -> Tensor:
    return x.as_subclass(_Elsewhere)


COMPILE = {
    "mesh larger than the world": (r"mesh has 4 ranks", r"world has 2"),
    "no axis names": ("no axis names", "mesh_dim_names"),
    "no pipeline axis": ("pipeline=", "no axis named 'pp'"),
    "not a pipeline": (r"autoparallel\.Pipeline", "str"),
    "four axes": ("one to three axes",),
    "another device": (r"up\.weight is on cpu", "'meta'", "move the model"),
    "a buffer elsewhere": ("table is on cuda:0", "'cpu'", "move the model"),
    "unknown plan": ("fspd", "data_parallel, fsdp, hybrid, tensor_parallel"),
    "unknown outputs": ("whole", "auto, gather, sharded"),
    "unknown backend": ("jit", "eager", "inductor"),
    "not a plan": ("plan", "int"),
    "not a module": ("nn.Module", "function"),
    "not a mesh": ("DeviceMesh", "tuple"),
    "compiled already": ("compiled already",),
    "compiled already, the plain one": ("DTensor already",),
    "wrapped": ("TypeError", "the model, a DistributedDataParallel", "the module it wraps"),
    "another model on a rank": ("RankMismatchError", r"rank 0: up\.weight \[8, 8\]", r"rank 1: up\.weight \[16, 8\]"),
    "another name on a rank": ("RankMismatchError", "rank 0: model Net", "rank 1: model Sequential"),
    "another dtype on a rank": ("RankMismatchError", "float32", "float64"),
    "frozen on a rank only": ("RankMismatchError", "up.weight"),
    "another plan on a rank": ("RankMismatchError", "'data_parallel'", "'fsdp'"),
    "another memory limit on a rank": ("RankMismatchError", "1000000000"),
    "other outputs on a rank": ("RankMismatchError", "gather"),
}


@pytest.fixture(scope="module")
def compilations() -> list[Results]:
    return run_on_ranks(_compile_badly, world_size=2)


@pytest.mark.parametrize("name", COMPILE)
def test_compile_refuses(name: str, compilations: list[Results]) -> None:
    check(compilations, name, *COMPILE[name])


# --------------------------------------------------------------------------------------------------------- at a call


def _call_badly(before: int) -> Results:
    """Mistakes in a model that has been called ``before`` times, in every way that is no mistake."""
    rank, first = dist.get_rank(), not before
    model, plain = compiled_pair(plan="data_parallel")
    x, y = batch(1)
    for _ in range(before):
        correct_call(model, plain)
    if before > 1:
        model(*batch(1, rows=16)), model(x), _without_gradients(model, x, y), _without_sync(model, x, y)
        model.eval()(x, y)
    calls: dict[str, Callable[[], Any]] = {
        "other values on a rank": lambda: model(x + rank, y),
        "other targets on a rank": lambda: model(x, y + rank),
        "another shape on a rank": lambda: model(*batch(1, rows=8 + 8 * rank)),
        "another dtype on a rank": lambda: model(x.float() if rank else x, y),
        "one input less on a rank": lambda: model(x, y) if rank else model(x),
        "eval on a rank": lambda: model.train(rank == 0)(x, y),
        "a keyword on a rank": lambda: model(y, x=x) if rank else model(x, y),
        "no_grad on a rank": lambda: _without_gradients(model, x, y) if rank else model(x, y),
        "no_sync on a rank": lambda: _without_sync(model, x, y) if rank else model(x, y),
        "a layer frozen on a rank": lambda: _frozen(model, rank == 1, x, y),
        "empty batch": lambda: model(x[:0], y[:0]),
        "shapes that do not fit": lambda: model(x[:, :6], y),
        "too many inputs": lambda: model(x, y, y, y),
        "unknown keyword": lambda: model(x, y, scale=2),
        "autocast on a rank": lambda: _under_autocast(model, x, y) if rank else model(x, y),
        "DTensor of another mesh": lambda: model(_sharded(x, init_device_mesh("cpu", (2,), mesh_dim_names=("b",))), y),
        "DTensor on a rank": lambda: model(_sharded(x, mesh_of(2)) if rank else x, y),
        "uneven DTensor": lambda: model(_sharded(x[: 4 - rank], mesh_of(2)), y),
    }
    results: Results = {}
    for name, call in calls.items():
        message = raised(call)
        model.requires_grad_(True), model.train()
        results[name] = (message, 0.0 if first else correct_call(model, plain))
    if first:  # nothing was compiled so far, and now it is
        assert not model._kinds
        results[name] = (message, correct_call(model, plain))
    results["calls"] = (f"{model._kinds.calls}", 0.0)
    return results


def _without_gradients(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x, y)


def _without_sync(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with model.no_sync():
        return model(x, y)


def _under_autocast(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x, y)


def _frozen(model: Any, freeze: bool, x: Tensor, y: Tensor) -> Tensor:
    model.up.requires_grad_(not freeze)
    return model(x, y)


def _sharded(x: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(x, mesh, [Shard(0)], run_check=False)


CALL = {
    "another shape on a rank": ("RankMismatchError", r"rank 0: train, inputs \(8, 8\)", r"rank 1: train, inputs \(16"),
    "another dtype on a rank": ("RankMismatchError", "float64", "float32"),
    "one input less on a rank": ("RankMismatchError", "rank 0", "rank 1"),
    "eval on a rank": ("RankMismatchError", "rank 0: train", "rank 1: eval"),
    "a keyword on a rank": ("RankMismatchError", r"rank 0: train, inputs \(8", r"rank 1: train, inputs .*\['x'\] \(8"),
    "no_grad on a rank": ("RankMismatchError", "rank 1: train, under no_grad"),
    "no_sync on a rank": ("RankMismatchError", "rank 1: train, in no_sync"),
    "a layer frozen on a rank": ("RankMismatchError", "rank 1: train, 4 of 6 parameters trained"),
    "other values on a rank": ("RankMismatchError", "DistributedDataParallel", "same batch", "model.local_rows"),
    "other targets on a rank": ("RankMismatchError", "DistributedDataParallel", "same batch"),
    "empty batch": ("empty|0 rows",),
    "shapes that do not fit": ("CaptureError", r"support\.py", "line"),
    "too many inputs": ("TypeError|CaptureError", "argument"),
    "unknown keyword": ("TypeError|CaptureError", "scale"),
    "autocast on a rank": ("RankMismatchError", "rank 1: .*autocast"),
    "DTensor of another mesh": ("another mesh",),
    "DTensor on a rank": ("RankMismatchError", "rank 1: .*DTensor S0"),
    "uneven DTensor": ("RankMismatchError|ValueError", r"\(8, 8\)|even|shape"),
}


@pytest.fixture(scope="module")
def first_calls() -> list[Results]:
    return run_on_ranks(_call_badly, 0, world_size=2)


@pytest.fixture(scope="module")
def later_calls() -> list[Results]:
    return run_on_ranks(_call_badly, 1, world_size=2)


@pytest.fixture(scope="module")
def known_calls() -> list[Results]:
    """After the first calls, ranks compare while the program runs already, and a sample of the values only."""
    return run_on_ranks(_call_badly, CHECKED_CALLS + 1, world_size=2)


@pytest.mark.parametrize("name", CALL)
def test_a_first_call_refuses(name: str, first_calls: list[Results]) -> None:
    check(first_calls, name, *CALL[name])


@pytest.mark.wide
@pytest.mark.parametrize("name", CALL)
def test_a_later_call_refuses(name: str, later_calls: list[Results]) -> None:
    check(later_calls, name, *CALL[name])


@pytest.mark.parametrize("name", CALL)
def test_a_known_call_refuses(name: str, known_calls: list[Results]) -> None:
    check(known_calls, name, *CALL[name])


@pytest.mark.wide
def test_a_refused_call_is_not_counted(later_calls: list[Results], known_calls: list[Results]) -> None:
    """Dropout depends on the number of calls, which must stay the same on all ranks."""
    for ranks, before in ((later_calls, 1), (known_calls, CHECKED_CALLS + 1 + 4)):
        assert {rank["calls"][0] for rank in ranks} == {str(before + len(CALL))}


class _Asking(nn.Module):
    """One of two programs, as a number says that is left open."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return (self.up(x).relu() if scale > 0.5 else self.up(x) * scale).sum()


def _ask_of_numbers() -> list[str]:
    """Numbers that are the same on both ranks, on either side, and then others."""
    model = autoparallel.compile(_Asking().double(), mesh_of(2), plan="fsdp")
    x, others = torch.ones(4, 8, dtype=torch.float64), (0.4 + 0.2 * dist.get_rank(), 0.4)
    return [raised(lambda k=k: model(x, k).backward()) for k in (0.1, 0.2, 0.7, 0.3, 0.8, *others)]


def test_ranks_that_pass_other_numbers_are_told_before_they_run_other_programs() -> None:
    for *same, other, last in run_distributed(_ask_of_numbers, world_size=2, timeout=60):
        assert {*same, last} == {""}, same
        assert re.search(r"RankMismatchError.*\n.*rank 0: .* 0\.4;.*\n.*rank 1: .* 0\.6", other), other


class _Reading(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * int(out.sum())  # the line


class _ReadingOnRank(Net):
    """What one rank cannot capture, the others do not run either."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * int(out.sum()) if dist.get_rank() == 1 else out


class _DifferentOnRank(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + dist.get_rank())


class _OtherOperatorOnRank(Net):
    """The first rank's plan names an operator that the other's graph has not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh() if dist.get_rank() else super().forward(x).relu()


def _capture_badly(kind: type[nn.Module]) -> tuple[str, float]:
    model, _ = compiled_pair(kind)
    other, plain = compiled_pair(Net)
    message = raised(lambda: model(*batch(1)))
    return message, correct_call(other, plain)


@pytest.mark.parametrize(
    ("kind", "patterns"),
    [
        (_Reading, ("CaptureError", r"test_errors\.py", "# the line", "keep it a tensor")),
        pytest.param(_ReadingOnRank, ("rank 1|CaptureError", "torch.where|keep it a tensor"), marks=pytest.mark.wide),
        (_DifferentOnRank, ("RankMismatchError", "different programs", r"rank 1: .*mul.*, 2")),
        (_OtherOperatorOnRank, ("RankMismatchError", "different programs", r"rank 0: .*relu", r"rank 1: .*tanh")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_model_that_cannot_be_captured(kind: type[nn.Module], patterns: tuple[str, ...]) -> None:
    results = run_on_ranks(_capture_badly, kind, world_size=2)
    for message, difference in results:
        assert all(re.search(p, message) for p in patterns), message
        assert difference < 1e-12


# ------------------------------------------------------------------------------------------------------------- plans


def _plan_badly() -> Results:
    import autoparallel
    from autoparallel.plan import Plan

    model, plain = compiled_pair(plan="fsdp")
    model.prepare(*batch(1))
    text = model.plan.to_json()
    data = json.loads(text)

    def compile_with(changed: Plan, used: nn.Module | None = None, *shape: int) -> None:
        autoparallel.compile(
            used or make(Net), mesh_of(*(shape or (2,))), loss_fn=F.mse_loss, plan=changed, example_inputs=batch(1)
        )

    def edited(**changes: Any) -> Plan:
        return Plan.from_json(json.dumps({**data, **changes}))

    def at_rest(layout: str, gather: str = "per_microbatch") -> dict[str, str]:
        return {"at_rest": layout, "gather": gather}

    parameters = data["parameters"]
    operators = data["operators"]
    first = next(key for key in operators if "linear" in key)
    calls: dict[str, Callable[[], Any]] = {
        "another mesh": lambda: compile_with(edited(mesh=[["dp", 4]])),
        "another axis name": lambda: compile_with(edited(mesh=[["tp", 2]])),
        "another model": lambda: compile_with(edited(), make(lambda: nn.Sequential(nn.Linear(8, 4)))),
        "other shapes": lambda: compile_with(edited(), make(lambda: Net(hidden=16))),
        "a parameter missing": lambda: compile_with(
            edited(parameters={k: v for k, v in parameters.items() if k != "up.weight"})
        ),
        "a parameter too many": lambda: compile_with(edited(parameters={**parameters, "up.wait": at_rest("S0")})),
        "a parameter that does not divide": lambda: compile_with(
            edited(parameters={**parameters, "up.bias": at_rest("S1")})
        ),
        "a parameter at rest as a summand": lambda: compile_with(
            edited(parameters={**parameters, "up.bias": at_rest("P")})
        ),
        "an unknown gather": lambda: compile_with(
            edited(parameters={**parameters, "up.bias": at_rest("S0", "sometimes")})
        ),
        "an impossible mode": lambda: compile_with(edited(operators={**operators, first: ["shard:zz"]})),
        "too few modes": lambda: compile_with(edited(operators={**operators, first: []})),
    }
    results: Results = {name: (raised(call), correct_call(model, plain)) for name, call in calls.items()}
    refused: Any = autoparallel.compile(make(Net), mesh_of(2), loss_fn=F.mse_loss, plan=edited(mesh=[["dp", 4]]))
    first = raised(lambda: refused(*batch(1)))
    again = raised(lambda: refused(*batch(1)))
    results["refused again at the next call"] = (again if first == again else "", correct_call(model, plain))
    return results


PLANS = {
    "another mesh": ("PlanError", r"\(dp=4\)", r"\(dp=2\)"),
    "another axis name": ("PlanError", r"\(tp=2\)", r"\(dp=2\)"),
    "another model": ("PlanError", "another model", "the (plan|model) has "),
    "other shapes": ("PlanError", "another model", "shapes differ"),
    "a parameter missing": ("PlanError", r"up\.weight"),
    "a parameter too many": ("PlanError", r"up\.wait"),
    "a parameter that does not divide": ("PlanError", r"up\.bias", "S1"),
    "a parameter at rest as a summand": ("PlanError", r"up\.bias", "P"),
    "an unknown gather": ("PlanError", r"up\.bias|sometimes"),
    "an impossible mode": ("PlanError", "linear", "shard:zz"),
    "too few modes": ("PlanError", "linear"),
    "refused again at the next call": ("PlanError", r"\(dp=4\)"),
}


@pytest.fixture(scope="module")
def plans() -> list[Results]:
    return run_on_ranks(_plan_badly, world_size=2)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_does_not_fit(name: str, plans: list[Results]) -> None:
    check(plans, name, *PLANS[name])


# ------------------------------------------------------------------------------------ gradients, norms and optimizers


def _train_badly() -> Results:
    import autoparallel

    source = make(Net)
    plain = copy.deepcopy(source)
    replaced = list(source.parameters())
    model: Any = autoparallel.compile(source, mesh_of(2), loss_fn=F.mse_loss, plan="fsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch(1)

    def inside(action: Callable[[], Any]) -> None:
        with model.no_sync():
            model(x, y).backward()
            action()

    def after(action: Callable[[], Any]) -> None:
        model(x, y).backward()
        action()

    def backward_twice() -> None:
        loss = model(x, y)
        loss.backward()
        loss.backward()

    calls: dict[str, Callable[[], Any]] = {
        "norm before any backward": lambda: model.clip_grad_norm_(1.0),
        "value before any backward": lambda: model.clip_grad_value_(1.0),
        "norm after zero_grad": lambda: after(lambda: (model.zero_grad(), model.clip_grad_norm_(1.0))),
        "norm inside no_sync": lambda: inside(lambda: model.clip_grad_norm_(1.0)),
        "value inside no_sync": lambda: inside(lambda: model.clip_grad_value_(1.0)),
        "negative max_norm": lambda: after(lambda: model.clip_grad_norm_(-1.0)),
        "nan max_norm": lambda: after(lambda: model.clip_grad_norm_(float("nan"))),
        "p of zero": lambda: after(lambda: model.clip_grad_norm_(1.0, norm_type=0.0)),
        "negative p": lambda: after(lambda: model.clip_grad_norm_(1.0, norm_type=-2.0)),
        "p of minus infinity": lambda: after(lambda: model.clip_grad_norm_(1.0, norm_type=-float("inf"))),
        "nan p": lambda: after(lambda: model.clip_grad_norm_(1.0, norm_type=float("nan"))),
        "negative value": lambda: after(lambda: model.clip_grad_value_(-1.0)),
        "step inside no_sync": lambda: inside(optimizer.step),
        "optimizer of plain parameters": lambda: after(torch.optim.SGD(replaced, lr=0.1).step),
        "create_graph inside no_sync": lambda: inside(lambda: model(x, y).backward(create_graph=True)),
        "backward twice": backward_twice,
        "to another dtype": lambda: model.float(),
        "to another device": lambda: model.to("meta"),
        "to other processes": lambda: model.share_memory(),
        "a parameter replaced": lambda: _with(model.up, "weight", nn.Parameter(plain.up.weight.detach()), model, x, y),
        "parameters exchanged": lambda: _exchange(model, x, y),
        "a parameter added": lambda: _with(model.up, "extra", nn.Parameter(torch.zeros(3)), model, x, y),
        "assign": lambda: model.load_state_dict(model.state_dict(), assign=True),
    }
    results: Results = {"plan before the first call": (raised(lambda: model.plan), 0.0)}
    for name, call in calls.items():
        model.zero_grad()
        message = raised(call)
        changed = parameters_off(model, plain)
        results[name] = (message, max(changed, correct_call(model, plain)))
    return results


def _exchange(model: Any, x: Tensor, y: Tensor) -> None:
    """Calls the model while two parameters stand in each other's place."""
    up, norm = model.up._parameters, model.norm._parameters
    up["bias"], norm["bias"] = norm["bias"], up["bias"]
    try:
        model(x, y)
    finally:
        up["bias"], norm["bias"] = norm["bias"], up["bias"]


def _with(owner: Any, name: str, parameter: nn.Parameter, model: Any, x: Tensor, y: Tensor) -> None:
    """Calls the model while a module has another parameter."""
    before = owner._parameters.get(name)
    setattr(owner, name, parameter)
    try:
        model(x, y)
    finally:
        delattr(owner, name)
        if before is not None:
            owner.register_parameter(name, before)
            for later in [n for n in owner._parameters if n == "bias"]:  # back into its place
                owner._parameters[later] = owner._parameters.pop(later)


TRAIN = {
    "norm before any backward": ("RuntimeError", r"clip_grad_norm_\(\) before any backward"),
    "value before any backward": ("RuntimeError", r"clip_grad_value_\(\) before any backward"),
    "norm after zero_grad": ("RuntimeError", "no parameter has a gradient"),
    "norm inside no_sync": ("RuntimeError", r"inside no_sync\(\)", "after the window"),
    "value inside no_sync": ("RuntimeError", r"inside no_sync\(\)"),
    "negative max_norm": ("ValueError", "max_norm", "-1"),
    "nan max_norm": ("ValueError", "max_norm", "nan"),
    "p of zero": ("ValueError", "norm_type", "0"),
    "negative p": ("ValueError", "norm_type", "-2"),
    "p of minus infinity": ("ValueError", "norm_type", "-inf"),
    "nan p": ("ValueError", "norm_type", "nan"),
    "negative value": ("ValueError", "value", "-1"),
    "step inside no_sync": ("RuntimeError", r"step\(\) inside no_sync\(\)", "Leave no_sync"),
    "optimizer of plain parameters": ("RuntimeError", "holds a plain parameter", r"list\(model.parameters\(\)\)"),
    "create_graph inside no_sync": ("RuntimeError", r"backward\(create_graph=True\)", "leaves .grad alone"),
    "backward twice": ("RuntimeError", "second time"),
    "plan before the first call": ("RuntimeError", "no plan yet", "example_inputs"),
    "to another dtype": ("RuntimeError", r"up\.weight would become torch\.float32", "then compile it"),
    "to another device": ("RuntimeError", r"up\.weight would become .* on meta", "then compile it"),
    "to other processes": ("RuntimeError", r"would share up\.weight with processes", "full_parameters"),
    "a parameter replaced": ("ValueError", "weight was added, removed or replaced after compile", "then compile it"),
    "parameters exchanged": ("ValueError", r"up\.bias was added, removed or replaced", "then compile it"),
    "a parameter added": ("ValueError", "added, removed or replaced after compile", "then compile it"),
    "assign": ("ValueError", "assign=False"),
}


@pytest.fixture(scope="module")
def training() -> list[Results]:
    return run_on_ranks(_train_badly, world_size=2)


@pytest.mark.parametrize("name", TRAIN)
def test_training_refuses(name: str, training: list[Results]) -> None:
    check(training, name, *TRAIN[name])
