"""``torch.compile(model, backend="autoparallel")`` against the plain model, and its errors."""

from __future__ import annotations

import copy
import itertools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autoparallel
from autoparallel.backend import Options
from autoparallel.tools.processes import ProcessError
from tests.distributed import failures_of, run_distributed
from tests.models import build
from tests.parity.harness import AXES, difference

STEPS = 3
ROOT = Path(__file__).parent.parent


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=AXES[len(shape)])


def _backend() -> Any:
    """The backend by name where the project is installed, and as a function where it only lies on the path."""
    from torch._dynamo import list_backends

    from autoparallel.backend import autoparallel as function

    return "autoparallel" if "autoparallel" in list_backends() else function


def _compile(model: nn.Module, mesh: DeviceMesh | None, **options: Any) -> Any:
    torch._dynamo.reset()
    dynamic = options.pop("dynamic", None)
    fullgraph = options.pop("fullgraph", False)
    chosen = {"mesh": mesh, **options} if mesh is not None else options
    return torch.compile(model, backend=_backend(), dynamic=dynamic, fullgraph=fullgraph, options=chosen)


# ------------------------------------------------------------------------------------------------------------- parity


def _train(model: Any, case: Any, rows: tuple[int, ...]) -> dict[str, Tensor]:
    """Everything that a short training shows, by name."""
    seen: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, count in enumerate(rows):
        args, kwargs = case.make_batch(step, count)
        if case.loss_fn is None:
            output = model(*args, **kwargs)
            loss = output["loss"] + 0.01 * output["logits"].pow(2).mean()  # the other output is differentiated, too
        else:
            loss = case.loss_fn(model(*args[:-1], **kwargs), args[-1])
        loss.backward()
        seen[f"step {step}: loss"] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            assert type(parameter.grad) is Tensor
            seen[f"step {step}: gradient of {name}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    seen |= {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
    seen |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    model.eval()
    args, kwargs = case.make_batch(100, rows[-1])
    with torch.no_grad():
        output = model(*args, **kwargs)["logits"] if case.loss_fn is None else model(*args[:-1], **kwargs)
    assert not output.requires_grad
    seen["evaluation"] = output.clone()
    return seen


def _case(name: str) -> Any:
    case = build(name, torch.float64)
    if name == "gpt2":
        # The property that finds the loss logs a warning, which breaks the graph in torch.compile with any backend.
        from transformers.loss.loss_utils import ForCausalLMLoss

        case.model.loss_function = ForCausalLMLoss
        del case.model.transformer.h[1:]  # one layer has all that is traced here
    return case


def _train_on_rank(name: str, shape: tuple[int, ...], plan: str, rows: tuple[int, ...], backend: str) -> Any:
    case = _case(name)
    compiled = _compile(case.model, _mesh(shape), plan=plan, backend=backend)
    seen = _train(compiled, case, rows)
    return {name.replace("_orig_mod.", ""): value for name, value in seen.items()}


def _check(
    name: str, shape: tuple[int, ...], plan: str, rows: tuple[int, ...] = (8, 8, 12), backend: str = "eager"
) -> None:
    case = _case(name)
    expected = _train(case.model, case, rows)
    world = 1
    for n in shape:
        world *= n
    ranks = run_distributed(_train_on_rank, name, shape, plan, rows, backend, world_size=world, timeout=280)
    assert ranks[0].keys() == expected.keys()
    wrong = {k: difference(ranks[0][k], v) for k, v in expected.items()}
    wrong = {k: off for k, off in wrong.items() if off > case.tolerance}
    assert not wrong, wrong
    for rank in ranks[1:]:
        for key, value in ranks[0].items():
            assert torch.equal(value, rank[key]), f"{key} differs between ranks"


@pytest.mark.wide_where(lambda plan: plan != "tensor_parallel")
@pytest.mark.slow_where(lambda name, shape: name == "gpt" or shape == (2, 2))
@pytest.mark.parametrize(
    ("name", "shape", "plan"),
    [
        *itertools.product(("mlp", "gpt"), ((2,), (2, 2)), ("data_parallel", "tensor_parallel", "auto")),
    ],
    ids=str,
)
def test_training_equals_the_plain_model(name: str, shape: tuple[int, ...], plan: str) -> None:
    # The third step has another number of rows: Dynamo compiles again, with the number of rows left open.
    _check(name, shape, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "plan"),
    [
        ((2,), "data_parallel"),
        ((2,), "tensor_parallel"),
        ((2, 2), "tensor_parallel"),
        ((2, 2), "data_parallel"),
    ],
    ids=str,
)
def test_batch_norm_takes_the_global_batch_and_its_buffers_are_written_back(shape: tuple[int, ...], plan: str) -> None:
    _check("resnet", shape, plan, rows=(8, 8))


@pytest.mark.wide
def test_dictionaries_and_keyword_inputs() -> None:
    _check("gpt2", (2,), "data_parallel", rows=(4, 4))


class Blocks(nn.Module):
    """A model of which everything about the way it is traced can be asked for."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return scale * self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))


def _blocks(seed: int = 0) -> Blocks:
    torch.manual_seed(seed)
    return Blocks().double()


def _one_backward(shape: tuple[int, ...], plan: str) -> dict[str, Any]:
    compiled = _compile(_blocks(), _mesh(shape), plan=plan)
    x = torch.arange(8 * 16, dtype=torch.float64).view(8, 16).sin().requires_grad_()
    torch.manual_seed(1)
    y = compiled(x, scale=2.0)
    with autoparallel.count_traffic() as backward:
        y.pow(2).sum().backward()
    grads = {name: p.grad for name, p in compiled.named_parameters()}
    return {"backward": backward.collectives, "y": y.detach(), "x": x.grad, **grads}


def test_gradients_are_reduced_in_one_collective_and_the_plan_shards() -> None:
    seen = run_distributed(_one_backward, (2,), "data_parallel", world_size=2)[0]
    # The input's gradient is gathered; all six parameters' gradients travel in one all-reduce.
    assert seen["backward"] == {("all_gather", "dp"): 1, ("all_reduce", "dp"): 1}


@pytest.mark.wide
def test_dropout_is_the_same_on_every_mesh() -> None:
    one = run_distributed(_one_backward, (1,), "auto", world_size=1)[0]
    for shape, plan in [((2,), "data_parallel"), ((2,), "tensor_parallel")]:
        for seen in run_distributed(_one_backward, shape, plan, world_size=2):
            for key in one.keys() - {"backward"}:
                assert difference(seen[key], one[key]) < 1e-9, (plan, key)


def _count_graphs() -> tuple[int, list[float]]:
    from torch._dynamo.utils import counters

    model = _blocks().eval()
    compiled = _compile(model, _mesh((2,)), plan="data_parallel")
    counters.clear()
    off = []
    for rows in (4, 6, 2, 8, 4):
        x = torch.randn(rows, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
        off.append(difference(compiled(x).detach(), model(x).detach()))
    return counters["stats"]["unique_graphs"], off


def test_a_batch_size_not_seen_before_needs_no_new_graph() -> None:
    graphs, off = run_distributed(_count_graphs, world_size=2)[0]
    assert graphs == 2  # one for the first size, one with the size left open
    assert max(off) < 1e-12


# ---------------------------------------------------------------------------------------------------------- options


class Rounded(nn.Module):
    """Rounds straight through, times three, with a weight of its own: nothing of that is its forward's derivative."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.both = both
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.down(BothWays.apply(x, self.scale)[0] if self.both else StraightThrough.apply(x, self.scale))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Any:
        rounded = (4 * x).round() / 4
        ctx.save_for_backward(rounded, scale)
        return rounded * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        rounded, scale = ctx.saved_tensors
        return 3 * grads[0] * scale, (grads[0] * rounded).sum(0)


class BothWays(StraightThrough):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Any:
        rounded = (4 * x).round() / 4
        ctx.save_for_backward(rounded, scale)
        ctx.mark_non_differentiable(rounded)
        return rounded * scale, rounded


def _rounded(both: bool, plan: str | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Rounded(both).double()
    called = model if plan is None else _compile(model, _mesh((2,)), plan=plan)
    x = torch.arange(8 * 16, dtype=torch.float64).view(8, 16).sin().requires_grad_()
    first, second = called(x), called(2 * x)  # the second call saves other values before the first is differentiated
    (first.pow(2).sum() + second.pow(3).sum()).backward()
    return {"x": x.grad, "y": first.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize(("both", "plan"), [(False, "auto"), (True, "tensor_parallel")])
def test_functions_of_the_users_keep_their_own_backward(both: bool, plan: str) -> None:
    expected = _rounded(both, None)
    for seen in run_distributed(_rounded, both, plan, world_size=2):
        assert max(difference(seen[key], value) for key, value in expected.items()) < 1e-9


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class ChangesItsArgument(Blocks):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.up(x)
        return self.down(InPlace.apply(x))  # breaks here


@pytest.mark.skipif(
    torch.__version__.startswith(("2.11.", "2.12.")), reason="Dynamo traces it until 2.12, with the numbers of eager"
)
def test_a_function_that_changes_its_argument_is_refused() -> None:
    for message in _errors(_call, ChangesItsArgument).values():
        assert f"line {_line_of(ChangesItsArgument)}, in forward" in message and "What to change" in message


def _with_options() -> dict[str, Any]:
    """What the options of ``compile()`` make of the same model, by either face."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    options = {"plan": "data_parallel", "precision": policy, "hardware": "h100", "check_inputs": 1}
    x = torch.arange(8 * 16.0).view(8, 16).sin()
    seen: dict[str, Any] = {}
    for face in ("torch", "ours"):
        model = _blocks().float().eval()
        compiled = _compile(model, _mesh((2,)), **options)
        if face == "ours":
            model = compiled = autoparallel.compile(_blocks().float().eval(), _mesh((2,)), outputs="gather", **options)
        y = compiled(x)
        y.pow(2).sum().backward()
        grads = [p.grad.full_tensor() if face == "ours" else p.grad for p in model.parameters()]
        seen[face] = [y.detach(), *grads]
    return seen


@pytest.mark.wide
def test_precision_and_hardware_are_those_of_compile() -> None:
    for seen in run_distributed(_with_options, world_size=2):
        for ours, torchs in zip(seen["ours"], seen["torch"], strict=True):
            assert ours.dtype == torchs.dtype == torch.float32
            assert torch.equal(ours, torchs)


def _priced(options: dict[str, Any]) -> tuple[Any, ...]:
    profiles = [
        Options(_mesh((2,)), **options).request(_mesh((2,))).profile,
        autoparallel.compile(_blocks(), _mesh((2,)), **options)._kinds.maker.request.profile,
    ]
    return tuple((profile.fuses, profile.optimizer.states) for profile in profiles)


def test_a_step_is_priced_as_by_compile() -> None:
    options = {"backend": "inductor", "optimizer": torch.optim.SGD}
    torchs, ours = run_distributed(_priced, options, world_size=2)[0]
    assert torchs == ours == (True, 0)


def _pinned(pins: dict[str, str]) -> dict[str, int]:
    y = _compile(_blocks().eval(), _mesh((2,)), pins=pins)(torch.ones(8, 16, dtype=torch.float64))
    with autoparallel.count_traffic() as backward:
        y.sum().backward()
    return {kind: count for (kind, _), count in backward.collectives.items()}


def test_a_module_can_be_pinned_and_a_parameter_stays_whole() -> None:
    assert run_distributed(_pinned, {"up": "R", "down": "R", "norm": "R"}, world_size=2)[0] == {}
    assert run_distributed(_pinned, {"up": "S0", "down": "S0", "norm": "S0"}, world_size=2)[0] == {"all_reduce": 1}
    for message in _errors(_pinned, {"up.weight": "S0"}).values():
        assert "pin up.weight=S0: torch.compile leaves parameters whole" in message


# ------------------------------------------------------------------------------------------------------- graph breaks


class BreaksInTheMiddle(Blocks):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.up(x)
        print(end="")  # breaks here
        return self.down(x)


class BreaksAtTheStart(Blocks):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        print(end="")  # breaks here
        return self.down(self.up(x))


class BranchesOnAValue(Blocks):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.up(x)
        if x.sum() > 0:  # breaks here
            x = x + 1
        return self.down(x)


class BreaksInALoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Blocks(), Blocks()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            print(end="")
            x = layer(x)  # breaks here
        return x


class BreaksOnOneRank(Blocks):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.up(x)
        if RANK == 1:
            print(end="")  # breaks here
        return self.down(x)


RANK = -1
BREAKING = (BreaksInTheMiddle, BreaksAtTheStart, BranchesOnAValue, BreaksInALoop)


def _call(kind: type[nn.Module], seed_by_rank: bool = False, **options: Any) -> None:
    global RANK
    RANK = dist.get_rank()
    torch.manual_seed(RANK if seed_by_rank else 0)
    compiled = _compile(kind().double(), _mesh((2,)), plan="data_parallel", **options)
    compiled(torch.ones(4, 16, dtype=torch.float64))


def _errors(function: Callable[..., Any], *args: Any, **options: Any) -> dict[int, str]:
    """What each of two ranks raised."""
    with pytest.raises(ProcessError) as caught:
        run_distributed(function, *args, world_size=2, keep_after_error=True, **options)
    errors = {rank: f"{e.type}: {e.message}" for rank, e in failures_of(caught.value).items()}
    assert errors.keys() == {0, 1}
    return errors


def _line_of(kind: type[nn.Module]) -> int:
    lines = Path(__file__).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"class {kind.__name__}("))
    return next(i for i in range(start, len(lines)) if "# breaks here" in lines[i]) + 1


@pytest.mark.parametrize("kind", BREAKING, ids=lambda kind: kind.__name__)
def test_a_graph_break_is_an_error_that_says_where(kind: type[nn.Module]) -> None:
    for message in _errors(_call, kind).values():
        assert "GraphBreakError: the model breaks into several graphs" in message
        found = re.search(r'at "([^"]+)", line (\d+), in forward', message)
        assert found and found[1].endswith("test_backend.py")
        assert int(found[2]) == _line_of(kind)


def test_a_graph_break_on_one_rank_is_an_error_on_both() -> None:
    for message in _errors(_call, BreaksOnOneRank).values():
        assert "RankMismatchError" in message
        assert f"line {_line_of(BreaksOnOneRank)}, in forward" in message


# ------------------------------------------------------------------------------------------------------------- errors


def test_the_mesh_is_required() -> None:
    with pytest.raises(Exception, match=r"options=\{'mesh': mesh\}"):
        _compile(Blocks(), None)(torch.ones(4, 16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "fastest"}, "unknown plan 'fastest'"),
        ({"plan": "fsdp"}, "shards the parameters"),
        ({"fullgraph": True}, "unknown option 'fullgraph'"),
        ({"outputs": "gather"}, "outputs are whole here"),
        ({"clip_grad_norm": 1.0}, "torch.nn.utils.clip_grad_norm_"),
        ({"pipeline": None}, "use autoparallel.compile"),
        ({"backend": "c++"}, "unknown backend 'c\\+\\+'"),
        ({"check_inputs": -1}, "must not be negative"),
    ],
)
def test_unusable_options(options: dict[str, Any], message: str) -> None:
    mesh = DeviceMesh.__new__(DeviceMesh)  # options are checked before the mesh is used
    with pytest.raises(ValueError, match=message):
        Options.parse({"mesh": mesh, **options}, None)


class DrawsNumbers(Blocks):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.down(torch.randint_like(self.up(x), self.up(x).max()))  # breaks here


def test_what_cannot_be_captured_names_the_line_of_the_model() -> None:
    for message in _errors(_call, DrawsNumbers).values():
        assert "draws random numbers" in message
        assert f'test_backend.py", line {_line_of(DrawsNumbers)}, in forward' in message


def test_ranks_with_other_parameters() -> None:
    for message in _errors(_call, Blocks, seed_by_rank=True).values():
        assert "RankMismatchError: up.weight has different values on different ranks" in message


def _call_apart(by_rank: dict[int, tuple[int, float]]) -> None:
    compiled = _compile(_blocks().eval(), _mesh((2,)), plan="data_parallel")
    compiled(torch.ones(4, 16, dtype=torch.float64))
    rows, value = by_rank[dist.get_rank()]
    compiled(torch.full((rows, 16), value, dtype=torch.float64))


def test_ranks_that_call_with_other_shapes_or_values() -> None:
    for message in _errors(_call_apart, {0: (4, 1.0), 1: (8, 1.0)}).values():  # rank 1 compiles, rank 0 calls
        assert re.search("the ranks call (or compile )?the model differently", message)
        assert "inputs (4, 16) torch.float64" in message and "compiles a graph of" in message
    for message in _errors(_call_apart, {0: (4, 1.0), 1: (4, 2.0)}).values():
        assert "the ranks pass different values as plain inputs" in message and "DTensor" not in message


def _call_uneven() -> float:
    plain = _blocks().eval()
    compiled = _compile(plain, _mesh((2,)), plan="data_parallel")
    x = torch.randn(7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return max(float((compiled(part) - plain(part)).abs().max()) for part in (x[:4], x[:5], x))


@pytest.mark.wide
def test_a_batch_that_does_not_divide() -> None:
    assert max(run_distributed(_call_uneven, world_size=2)) < 1e-12


def _differentiate_twice() -> float:
    plain = _blocks().eval()
    compiled = _compile(copy.deepcopy(plain), _mesh((2,)), plan="data_parallel")
    grads = []
    for model in (plain, compiled):
        x = torch.linspace(-1, 1, 64, dtype=torch.float64).view(4, 16).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).exp().mean(), x, create_graph=True)
        grad.pow(2).sum().backward()
        weights = [p for p in model.parameters() if p.grad is not None]
        taken = torch.autograd.grad(model(x).exp().mean(), weights, create_graph=True)
        sum(g.square().sum() for g in taken).backward()  # type: ignore[union-attr]
        grads.append([x.grad, *(each.detach() for each in (grad, *taken)), *(p.grad for p in weights)])
    assert len(grads[0]) == len(grads[1]) > 8
    assert all(float(a.abs().max()) > 1e-6 for a in grads[0] if a is not None)
    return max(
        float(((b.full_tensor() if isinstance(b, DTensor) else b) - a).abs().max())  # type: ignore[union-attr]
        for a, b in zip(*grads, strict=True)
    )


def test_a_second_derivative_is_that_of_the_model() -> None:
    assert max(run_distributed(_differentiate_twice, world_size=2)) < 1e-12


# -------------------------------------------------------------------------------------------------------- entry point

PROGRAM = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
assert "autoparallel" not in sys.modules
model = torch.nn.Linear(4, 2)
y = torch.compile(model, backend="autoparallel", options={"mesh": mesh})(torch.ones(3, 4))
assert torch.equal(y, model(torch.ones(3, 4)))
assert "autoparallel" in sys.modules
y.sum().backward()
dist.destroy_process_group()
print("found", model.weight.grad.sum().item())
"""


@pytest.mark.wide
def test_torch_finds_the_backend_without_an_import(tmp_path: Path) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    entry = declared["torch_dynamo_backends"]["autoparallel"]
    about = tmp_path / "torch_autoparallel-0.0.0.dist-info"  # what an installer leaves
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-autoparallel\nVersion: 0.0.0\n")
    (about / "entry_points.txt").write_text(f"[torch_dynamo_backends]\nautoparallel = {entry}\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("found 24.0")
