"""``compile()``: the whole way through, from a plain model to a module that trains on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from autoparallel import _torch
from autoparallel.capture.python.loss_functions import with_variable
from autoparallel.comm.groups import bind, inner_mesh, whole_group, whole_group_name, with_data_axis
from autoparallel.comm.world import PIPELINE_AXIS, usable_mesh
from autoparallel.compiler import Compiler, Settings, mesh_of
from autoparallel.decisions.means import OpenMeans
from autoparallel.decisions.pipeline import Pipeline
from autoparallel.hardware import Profile
from autoparallel.plan import Plan
from autoparallel.planner.plan_cache import PlanCache
from autoparallel.planner.request.pins import parse_pins
from autoparallel.planner.request.presets import PRESETS, Preset
from autoparallel.planner.request.request import Request, limit_in_bytes, pipeline_refusal, profile_of_run
from autoparallel.predict.optimizer import MakeOptimizer
from autoparallel.report.progress import Progress
from autoparallel.runtime.dtensors.operators import handle_operators
from autoparallel.runtime.gradients.store import GradientStore
from autoparallel.runtime.module import ParallelModule
from autoparallel.runtime.norms.limits import ClipGradNorm
from autoparallel.runtime.parameters.state import broadcast, make_dtensors, require_on_device
from autoparallel.runtime.programs.compiled import make_body_of, require_backend
from autoparallel.runtime.ranks.agreement import Agreement, agreement_of
from autoparallel.runtime.ranks.randomness import STREAM

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

Outputs = Literal["auto", "gather", "sharded"]
OUTPUTS = get_args(Outputs)


def compile(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    example_inputs: tuple[Any, ...] | None = None,
    plan: Preset | Plan = "auto",
    pins: Mapping[str, Any] | Plan | None = None,
    forbid: Mapping[str, Any] | None = None,
    hardware: str | Path | Profile | None = None,
    memory_limit: float | str | None = None,
    optimizer: MakeOptimizer | None = None,
    outputs: Outputs = "auto",
    backend: str = "eager",
    precision: MixedPrecisionPolicy | None = None,
    clip_grad_norm: float | Mapping[str, float] | ClipGradNorm | None = None,
    pipeline: Pipeline | None = None,
    loss_chunks: int | None = None,
    linear_chunks: int | None = None,
    microbatches: int | None = None,
    offload_optimizer: bool | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    check_inputs: int | None = None,
    check_replicas: int | None = None,
    methods: Sequence[str] = (),
    forward_methods: Sequence[str] = (),
    cache: str | Path | None = None,
) -> ParallelModule:
    """Makes a plain single-device model train on a whole mesh.

    Args:
        model: the plain model; its parameters are replaced by ``DTensor``s of the same names. The first rank's
            weights are used. Parameters on the meta device are materialised, each rank its part.
        mesh: one to three named axes, and one named "pp" for a pipeline: the model is cut into stages that lie along
            it. None: all ranks of the launcher; without a launcher, one rank. With ``plan="auto"`` and nothing pinned,
            the first call then searches into which axes to factor them, a pipeline's among them, and so it does where
            a mesh of all ranks has one axis without a name. With a preset or pins they lie on one axis "dp", with a
            saved plan as it says.
        loss_fn: called as ``loss_fn(output, target)``; the last positional argument of a call is the target then. It
            returns the loss, or ``(sum, count)`` with an integer count: the loss is their quotient then.
        example_inputs: positional inputs of a first call (the target last): traces and plans now instead of then.
        plan: "auto", a preset ("data_parallel", "fsdp", "hybrid", "tensor_parallel",
            "fsdp_tensor_parallel", "expert_parallel", "context_parallel"), or a :class:`Plan`.
        pins: what some parameters and modules must be, beside ``plan``: ``{"layers.*.up.weight": (Replicate(),
            Shard(0))}`` with one of torch's placements for each mesh axis, or None for an axis that stays open. A
            parameter lies so between steps; a module makes its result so. Or a saved :class:`Plan`, of which all is
            kept that the model still has, while the rest is searched again.
        forbid: the same for how they must not lie.
        hardware: what the plan is made for: "a100", "h100", "h200", "b200", "cpu", a profile, or the file of one that
            ``python -m autoparallel calibrate`` wrote. None: "cpu" on CPUs, and on GPUs what
            torch calls them; one that is not known is planned for as an "h100", and a warning says so.
        memory_limit: bytes per device for parameters, gradients, optimizer states and saved activations, as a number or
            as "70GB"; at most 1, a part of the device's memory. None: what the hardware has, less the reserve that its
            profile says (10% of a GPU); no limit where that is not known, as on CPUs. No plan that is predicted to need
            more is chosen.
        optimizer: what plans are priced for: a class or a function that makes one from a list of parameters
            (``lambda parameters: torch.optim.SGD(parameters, lr=0.1)``). Its states and its step are known from one
            step on a small matrix; the loop makes its own. None: AdamW.
        outputs: "gather" returns outputs whole, "sharded" as they are made; all of them can be differentiated. "auto"
            is "gather", unless the loss is known, because ``loss_fn`` computed it (its first scalar, if it returns
            several outputs) or because an output is called "loss": the others are sharded then, and differentiating
            them is an error. A pipeline differentiates its loss only.
        precision: torch's own ``MixedPrecisionPolicy``: the dtype parameters are cast to, then gathered and used in
            (``param_dtype``), the dtype gradients are reduced in (``reduce_dtype``; None: that of their use), and the
            dtype of the model's outputs before ``loss_fn`` (``output_dtype``). Parameters at rest, gradients and
            accumulators keep the model's dtype. Give an ``output_dtype`` of float32 for the loss to be computed in it.
        backend: "eager" runs the program in plain autograd; any other name is that of a backend of ``torch.compile``,
            such as "inductor", with which each distinct region of the program is compiled, once for layers that are
            alike. Plans, gathers, recomputation and pipelines are the same.
        clip_grad_norm: every step of an optimizer first clips the gradients to this global norm, as
            :meth:`ParallelModule.clip_grad_norm_` does; a number, limits by pattern of parameter names, or a
            :class:`ClipGradNorm` with another p or a policy for norms that are not finite.
            ``model.last_grad_norm`` is the norm of the last step.
        pipeline: what to fix of the pipeline over "pp": its schedule, its number of microbatches or of stages per rank,
            or where it is cut. What is left open is planned.
        loss_chunks: computes a cross-entropy, with the linear layer that makes its logits, in this many chunks of rows,
            so that the logits, which nothing else may read, never exist whole; the numbers are the same. None leaves it
            to the plan.
        linear_chunks: computes linear layers that read what ranks exchange, or make it, in this many chunks of rows, so
            that what one chunk exchanges runs while the others are computed (asynchronous tensor parallelism). None
            leaves it to the plan, which takes what is predicted to be fastest; 1 leaves layers whole.
        microbatches: cuts the batch of each training call into this many parts, or the next more that divide its rows,
            which run forward and backward one after another, with the loss and the gradients of the whole batch; a
            model for which these would differ is refused.
            Outputs beside the loss are kept with ``outputs="gather"`` only. None leaves it to the plan. For a mesh with
            an axis "pp" give ``pipeline=Pipeline(microbatches=...)``.
        offload_optimizer: keeps the optimizer's states in host memory, from where they come to the device for their own
            update; the numbers are the same. The optimizer must be one of ``torch.optim``'s whose step can be cut, or
            registered by :func:`register_optimizer`. None leaves it to the plan, which does so within a limit on memory
            where nothing else fits, or where it is predicted to be faster than what else saves memory.
        grad_scaler: the scaler of the loop. A pipeline, and calls in microbatches, must know it, because their
            gradients are computed before the loss is scaled; others need not be told.
        check_inputs: at every so many calls the ranks compare a sample of 512 elements of each plain input, so that a
            rank that has left out a batch is found; on the first three calls they compare all. 0: never after those.
            None: at every call on CPUs, where that costs tens of microseconds, and at every 100th on other devices,
            which must be waited for.
        check_replicas: at the first call and then at every so many the ranks compare digests of what must be
            equal on them: parameters along the axes that do not shard them, and buffers. What differs stops the
            job, with its name and its ranks. None: never.
        methods: names of the model's methods, such as ``("generate",)``, that run on the plain model with its full
            parameters, gathered for each call of them (see :meth:`ParallelModule.whole`).
        forward_methods: names of methods that are traced, planned and trained as ``forward`` is, such as
            ``("get_value",)`` (what ``register_fsdp_forward_method`` is for).
        cache: a folder in which plans, and the choice of the mesh, are kept from run to run, under a digest of all that
            the search depends on, this package's own code among it; the first rank's is used. None keeps none.

    Raises:
        TypeError, ValueError: for a mesh, a model or an option that cannot be used.
        RankMismatchError: on every rank, when the ranks have different models or options.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not a {type(model).__name__}")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh (see init_device_mesh), not a {type(mesh).__name__}")
    require_options(plan, pins, forbid, outputs, backend, precision, check_inputs)
    _require_loss(loss_fn)
    if example_inputs is not None and not isinstance(example_inputs, tuple | list):
        kind = type(example_inputs).__name__
        raise TypeError(f"example_inputs must be a tuple of the positional inputs of a call, not a {kind}")
    if cache is not None and not isinstance(cache, str | Path):
        raise TypeError(f"cache must be the path of a folder, not a {type(cache).__name__}")
    if check_replicas is not None and (type(check_replicas) is not int or check_replicas < 1):
        raise ValueError(f"check_replicas must be a positive number of calls, got {check_replicas!r}")
    if clip_grad_norm is not None and not isinstance(clip_grad_norm, ClipGradNorm):
        clip_grad_norm = ClipGradNorm(clip_grad_norm)
    if pipeline is not None and not isinstance(pipeline, Pipeline):
        raise TypeError(f"pipeline must be an autoparallel.Pipeline, not a {type(pipeline).__name__}")
    means = OpenMeans(
        loss_chunks=loss_chunks,
        linear_chunks=linear_chunks,
        microbatches=microbatches,
        offload_optimizer=offload_optimizer,
    )
    if isinstance(plan, Plan):
        for name, value in {"pipeline": pipeline, **vars(means)}.items():
            if value is not None:
                raise ValueError(f"a Plan is carried out as it is, with its own {name}: leave {name}=... out")
        means = OpenMeans(**vars(plan.means))  # later kinds of calls are asked for them, too
    if isinstance(model, ParallelModule):
        raise ValueError("the model is compiled already: use what the first compile() returned")
    _require_capturable(model)
    _require_methods(model, "methods", methods)
    _require_methods(model, "forward_methods", forward_methods)
    saved = plan if isinstance(plan, Plan) else pins if isinstance(pins, Plan) else None
    is_open = plan == "auto" and pins is None and forbid is None and _is_open(mesh)
    mesh = mesh_of(saved, model) if saved is not None and mesh is None else usable_mesh(mesh, model, is_open)
    is_open = is_open and mesh.size() > 1
    staged = PIPELINE_AXIS in (mesh.mesh_dim_names or ())
    if pipeline is not None and not staged and not is_open:
        raise ValueError("pipeline=... was given, but the mesh has no axis named 'pp' for it")
    dtypes = {p.dtype for p in _torch.tensors.parameters_of(model)}
    unable = pipeline_refusal(precision, outputs, grad_scaler, dtypes)
    means, unable = _settle_microbatches(means, staged, unable)
    mesh = with_data_axis(mesh) if staged else mesh
    inner = inner_mesh(mesh, PIPELINE_AXIS) if staged else mesh
    require_on_device(model, mesh)
    profile = profile_of_run(mesh.device_type, hardware, backend, optimizer)
    request = Request(
        axes=tuple(zip(inner.mesh_dim_names or (), inner.shape, strict=True)),
        profile=profile,
        plan=plan,
        pins=parse_pins(pins, forbid),
        loss_fn=with_variable(loss_fn),
        memory_limit=limit_in_bytes(memory_limit, profile),
        outputs=outputs,
        precision=precision,
        device=mesh.device_type,
        pipeline=pipeline,
        compiled=backend != "eager",
        **vars(means),
    )
    STREAM.begin()
    agreement = agreement_of(mesh)
    _require_same_model(
        agreement, model, request, backend=backend, clip_grad_norm=clip_grad_norm, pipeline=pipeline,
        cache=cache is not None,
    )  # fmt: skip
    prefix = bind(mesh)
    with Progress(type(model).__name__, agreement.is_first).phase("parameters"):
        buffers = [t for _, x in _torch.tensors.sorted_buffers(model) for t in _torch.tensors.dense_parts(x)]
        tensors = [t.detach() for t in (*_torch.tensors.parameters_of(model), *buffers) if t.device.type != "meta"]
        broadcast(tensors, agreement.ranks, whole_group(prefix))
        make_dtensors(model, mesh)
    handle_operators()
    everyone = whole_group_name(prefix) if staged else None
    store = GradientStore(inner, bind(inner, mesh), dict(model.named_parameters()), everyone)
    make_body = make_body_of(backend)
    settings = Settings(model, agreement, store, make_body, scaler=grad_scaler, unable=unable, cache=PlanCache(cache))
    module = ParallelModule(
        Compiler(settings, mesh, request, is_open),
        has_loss_fn=loss_fn is not None,
        clip_grad_norm=clip_grad_norm,
        check_inputs=check_inputs,
        check_replicas=check_replicas,
        methods=methods,
        forward_methods=forward_methods,
    )
    if example_inputs is not None:
        module.prepare(*example_inputs)
    return module


def require_options(
    plan: object, pins: object, forbid: object, outputs: str, backend: str, precision: object, check_inputs: object
) -> None:
    """Raises TypeError or ValueError for options of ``compile()``, as either face takes them, that cannot be used."""
    expected = f"one of {', '.join(PRESETS)}, or a Plan (of a file: Plan.load(path))"
    if not isinstance(plan, str | Plan):
        raise TypeError(f"plan must be {expected}, not a {type(plan).__name__}")
    if isinstance(plan, str) and plan not in PRESETS:
        raise ValueError(f"unknown plan {plan!r}: expected {expected}")
    if isinstance(plan, Plan) and (pins is not None or forbid is not None):
        raise ValueError("a Plan is carried out as it is, so that nothing can be pinned: give it as pins=plan instead")
    if outputs not in OUTPUTS:
        raise ValueError(f"unknown outputs {outputs!r}: expected one of {', '.join(OUTPUTS)}")
    require_backend(backend)
    if precision is not None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if not isinstance(precision, MixedPrecisionPolicy):
            raise TypeError(
                "precision must be a torch.distributed.fsdp.MixedPrecisionPolicy, such as "
                "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), not "
                f"{precision if isinstance(precision, torch.dtype) else f'a {type(precision).__name__}'}"
            )
    if check_inputs is not None and (isinstance(check_inputs, bool) or not isinstance(check_inputs, int)):
        raise TypeError(f"check_inputs must be a number of calls, not a {type(check_inputs).__name__}")
    if check_inputs is not None and check_inputs < 0:
        raise ValueError(f"check_inputs must not be negative, got {check_inputs}")


def _require_loss(loss_fn: object) -> None:
    if loss_fn is None or callable(loss_fn) and not isinstance(loss_fn, type):
        return
    kind = f"the class {loss_fn.__name__}" if isinstance(loss_fn, type) else f"a {type(loss_fn).__name__}"
    raise TypeError(f"loss_fn must be a function of an output and a target (F.cross_entropy, nn.MSELoss()), not {kind}")


def _require_capturable(model: nn.Module) -> None:
    """Refuses modules that no trace of the model can follow, or whose parameters have no shape yet."""
    for path, module in model.named_modules():
        name = f"{path or 'the model'}, a {type(module).__name__},"
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"{name} is TorchScript\nWhat to change: give its class itself, without torch.jit.script.")
        if isinstance(module, DistributedDataParallel):
            raise TypeError(f"{name} reduces gradients itself\nWhat to change: give compile() the module it wraps.")
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module._parameters.values()):
            raise ValueError(f"{name} is lazy\nWhat to change: call the plain model once, then compile it.")


def _require_methods(model: nn.Module, option: str, methods: Sequence[str]) -> None:
    if isinstance(methods, str) or not all(isinstance(name, str) for name in methods):
        raise TypeError(f"{option} must be names of methods, such as ('generate',), not {methods!r}")
    for name in methods:
        if hasattr(ParallelModule, name):
            raise ValueError(f"{option} names {name!r}, which every compiled model has: rename the model's own method")
        if not callable(getattr(model, name, None)):
            raise ValueError(f"{option} names {name!r}, which is no method that {type(model).__name__} itself has")


def _settle_microbatches(means: OpenMeans, staged: bool, unable: str) -> tuple[OpenMeans, str]:
    """What is fixed of the means, and why a mesh that is searched may have no pipeline; empty where it may.

    Args:
        staged: whether the mesh has an axis for a pipeline.
        unable: why a batch cannot be cut into microbatches; empty where it can.

    Raises:
        ValueError: where what is asked for does not go together.
    """
    count = means.microbatches
    cuts_batch = count is not None and count > 1
    if staged and cuts_batch:
        raise ValueError(
            f"microbatches={count} is for meshes without an axis named 'pp': give "
            f"pipeline=autoparallel.Pipeline(microbatches={count})"
        )
    if (staged or cuts_batch) and unable:
        raise ValueError(unable)
    if cuts_batch:
        return means, "microbatches=... was given, which is for calls without a pipeline"
    return replace(means, microbatches=1) if unable and count is None else means, unable


def _is_open(mesh: DeviceMesh | None) -> bool:
    """Whether the search may factor a mesh into axes."""
    return mesh is None or not mesh.mesh_dim_names and mesh.ndim == 1 and mesh.size() == dist.get_world_size()


def _require_same_model(agreement: Agreement, model: nn.Module, request: Request, **options: object) -> None:
    parameters = model.named_parameters(remove_duplicate=False)
    tensors = [*parameters, *_torch.tensors.sorted_buffers(model, remove_duplicate=False)]
    plan = request.plan
    of_request = "memory_limit", "outputs", "open_means", "precision"
    options |= {name: getattr(request, name) for name in of_request} | {"hardware": request.profile}
    parts = [(name, part) for name, tensor in tensors for part in _torch.tensors.dense_parts(tensor)]
    lines = [
        f"model {type(model).__name__}",
        *(f"{name}={value!r}" for name, value in options.items()),
        *(plan.to_json().splitlines() if isinstance(plan, Plan) else [f"plan={plan!r}"]),
        *request.pins.text().splitlines(),
        *(f"{n} {list(t.shape)} {t.dtype} on {t.device.type}{', trained' * t.requires_grad}" for n, t in parts),
    ]
    agreement.require_same_text("the ranks compile different models or options:", "\n".join(lines))
