"""``python -m autoparallel plan``: a plan for any number of devices, made on this one, without any of theirs."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autoparallel.comm.world import Axes, axes_of, mesh_size, mesh_text
from autoparallel.decisions.meshes import MeshChoice
from autoparallel.decisions.parameters import PlanError
from autoparallel.decisions.prediction import Prediction
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured
from autoparallel.graph.garbage import FEW, collected_rarely, frozen_inside
from autoparallel.hardware import PROFILES
from autoparallel.plan import Plan
from autoparallel.planner.candidates.evaluation import Evaluator
from autoparallel.planner.candidates.meshes import MeshSearch
from autoparallel.planner.draft import call_of, capture_given, draft_captured
from autoparallel.planner.plan_cache import PlanCache
from autoparallel.planner.planner import Planner
from autoparallel.planner.reasons import PlanAgain
from autoparallel.planner.request.pins import Pins, parse_pins
from autoparallel.planner.request.presets import PRESETS, Preset, possible_presets
from autoparallel.planner.request.request import Request, limit_in_bytes, pipeline_refusal, profile_of_run
from autoparallel.predict.cost import workload_of
from autoparallel.report.comparison import Comparison, comparison_blocks, report
from autoparallel.report.meshes import choice_blocks
from autoparallel.report.progress import Progress
from autoparallel.report.trace import trace_of
from autoparallel.text import plain_text
from autoparallel.tools.answers import FILES, Answer, File, answer_key
from autoparallel.tools.sources import Source, UsageError, config_file, from_config, from_factory, require_writable


@dataclass(frozen=True)
class Job:
    """What is planned.

    Attributes:
        source: the model.
        call: one call of it.
        captured: the graph of that.
    """

    source: Source
    call: Call
    captured: Captured


def add_arguments(parser: argparse.ArgumentParser, mesh: Callable[[str], Any]) -> None:
    """The command's options."""
    parser.add_argument(
        "--model",
        required=True,
        help="module:function or file.py:function that makes (model, example_inputs[, loss_fn]), see below; or a "
        "config.json of transformers",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--mesh",
        type=mesh,
        help="the mesh axes: dp=8,tp=8, pp=4,dp=2,tp=8 for a pipeline, or only sizes (8,8), the axes dp, tp (of "
        "three: pod, dp, tp); auto:64 as --devices 64",
    )
    where.add_argument("--devices", type=_count, help="how many devices; the search factors them into mesh axes")
    parser.add_argument(
        "--hardware", default="h100", help=f"{', '.join(PROFILES)}, or a calibrated profile (default: h100)"
    )
    parser.add_argument("--plan", default="auto", help=f"the plan to write: {', '.join(PRESETS)}, or a plan's .json")
    parser.add_argument("--batch", type=_count, help="rows of the global batch, for a factory that takes batch=")
    parser.add_argument("--seq", type=_count, help="tokens of a row, for a factory that takes seq=")
    parser.add_argument("--precision", choices=("bfloat16", "float16"), help="the dtype parameters are used in")
    parser.add_argument(
        "--memory-limit",
        help="bytes (70e9, 70GB), or a part of the device's memory (0.9); unless told, what the hardware has, less a "
        "reserve",
    )
    parser.add_argument("--optimizer", default="AdamW", help="a class of torch.optim (default: AdamW)")
    parser.add_argument(
        "--offload-optimizer", action=argparse.BooleanOptionalAction, help="whether its states lie in host memory"
    )
    parser.add_argument("--loss-chunks", type=_count, help="into how many chunks of rows the loss is cut")
    parser.add_argument(
        "--linear-chunks",
        type=_count,
        help="into how many chunks of rows linear layers are cut, whose exchange overlaps",
    )
    parser.add_argument("--microbatches", type=_count, help="into how many parts a call cuts its batch; not with pp")
    parser.add_argument("--pin", action="append", default=[], metavar="NAME=S0,R", help="pin parameters or a module")
    parser.add_argument("--forbid", action="append", default=[], metavar="NAME=S0,*", help="forbid a layout")
    parser.add_argument("--pins", metavar="PLAN", help="a saved plan that is kept as far as the model still has it")
    parser.add_argument("--compare", default="all", help="presets beside the plan, with commas; all or none")
    parser.add_argument(
        "--beside",
        type=mesh,
        action="append",
        default=[],
        metavar="MESH",
        help="another mesh of as many devices, which the report shows to switch to; may be given several times",
    )
    parser.add_argument(
        "--doublings",
        type=int,
        default=0,
        metavar="TIMES",
        help="also plan the same step for twice the devices, four times as many, ...: the first axis grows, or the "
        "search factors them",
    )
    parser.add_argument("--real-tensors", action="store_true", help="give the factory real memory, not meta tensors")
    parser.add_argument("--seed", type=int, default=0, help="seed of the factory (default: 0)")
    parser.add_argument("--explain", action="store_true", help="print the whole plan, too")
    parser.add_argument("--passes", action="store_true", help="print the program before and after each pass, too")
    parser.add_argument("--cache", help="a folder in which plans and answers are kept, to be found by the next run")
    parser.add_argument("--out", help="write the plan as JSON")
    parser.add_argument("--trace", help="write the predicted step as a trace for Perfetto")
    parser.add_argument("--report", help="write a report as one HTML file that needs no network")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Plans, prints the comparison, and writes what was asked for; or does so with what the cache has of it."""
    cache = PlanCache(options.cache or None)
    for name in FILES:
        require_writable(getattr(options, name))
    key = answer_key(options) if options.cache else None
    answer = cache.get(key, Answer.from_json)
    if answer is None:
        answer = _answer(options, cache)
        if key is not None and key == answer_key(options):  # no file that is read has changed meanwhile
            cache.put(key, answer.to_json())
    print(answer.text)
    for name, file in answer.files.items():
        Path(getattr(options, name)).write_text(file.text)
        print(file.said)
    return 0


@collected_rarely(FEW)
@frozen_inside()
def _answer(options: argparse.Namespace, cache: PlanCache) -> Answer:
    """What is to be printed and written."""
    source, request, call, mesh = prepare(options)
    with _progress(request.origin).phase("trace"):
        captured, call = capture_given(Planner(source.model, request), call)
    job = Job(source, call, captured)
    gc.freeze()  # what there is lives on: a tenth of the command's time went into looking through it for garbage
    choice: MeshChoice | None = None
    evaluator: Evaluator | None = None
    if isinstance(mesh, int):
        choice, evaluator = _choose(job, request, mesh)
        request = request.on(choice.mesh)
    compared = compare(job, request, _presets(options, request), choice, evaluator, cache)
    larger = [_on_more_devices(job, request, mesh, 2**i) for i in range(1, options.doublings + 1)]
    compared = replace(compared, larger=larger)
    plan = compared.plan
    assert isinstance(plan, Plan)
    texts = [plain_text(f"{compared.title}: {compared.step}", *choice_blocks(choice), *comparison_blocks(compared))]
    if options.explain:
        texts.append(plan.explain())
    if options.passes:
        texts.append(plan.explain(passes=True))
    files: dict[str, File] = {}
    if options.out:
        precision = f", precision={request.precision!r}" if request.precision is not None else ""
        said = f"""
wrote {options.out}; run it, without a search, with
  autoparallel.compile(model, plan=autoparallel.Plan.load("{options.out}"){precision})"""
        files["out"] = File(plan.to_json(), said + (f"\n  {source.call}" if source.call else ""))
    if options.trace:
        files["trace"] = File(json.dumps(trace_of(plan)), f"wrote {options.trace}")
    if options.report:
        others = [_on_other_mesh(job, request, axes, options) for axes in options.beside]
        files["report"] = File(report(compared, *others), f"wrote {options.report}")
    return Answer("\n\n".join(map(str, texts)), files)


def _choose(job: Job, request: Request, devices: int) -> tuple[MeshChoice, Evaluator]:
    """How devices are factored, and what plans on the mesh that was chosen."""
    refusal = pipeline_refusal(request.precision, request.outputs)
    search = MeshSearch(request, job.captured, job.call, devices, refusal)
    with _progress(f"mesh of {devices}").phase("search"):
        choice = search.choose()
    return choice, search.evaluator(choice.mesh)


def _on_more_devices(job: Job, request: Request, mesh: Axes | int, times: int) -> Comparison:
    """What would be decided on so many times the devices, of the same step."""
    try:
        evaluator: Evaluator | None = None
        if isinstance(mesh, int):
            choice, evaluator = _choose(job, request, times * mesh)
            axes = choice.mesh
        else:
            grown = next(name for name, _ in mesh if name != "pp" or len(mesh) == 1)
            axes = tuple([(name, size * times if name == grown else size) for name, size in mesh])
        return compare(job, request.on(axes), [], evaluator=evaluator)
    except (PlanError, ValueError) as error:
        raise UsageError(f"--doublings: {times} times the devices: {error}") from error


def _on_other_mesh(job: Job, request: Request, axes: Axes, options: argparse.Namespace) -> Comparison:
    """What would be decided on another mesh of as many devices."""
    try:
        moved = request.on(axes)
        return compare(job, moved, _presets(options, moved))
    except (PlanError, ValueError) as error:
        raise UsageError(f"--beside {mesh_text(axes)}: {error}") from error


def prepare(options: argparse.Namespace) -> tuple[Source, Request, Call, Axes | int]:
    """The model, what is asked of the planner, the call that is planned for, and the mesh: its axes, or the number of
    devices that the search factors."""
    mesh = options.devices if options.devices is not None else options.mesh
    for other in options.beside:
        if isinstance(other, int) or not options.report:
            raise UsageError("--beside is a mesh by its axes (dp=8,tp=8), for --report to show")
        if _devices(other) != _devices(mesh):
            raise UsageError(f"--beside {mesh_text(other)} has not the {_devices(mesh)} devices of the mesh")
    plan = plan_of(options.plan)
    if isinstance(mesh, int) and (plan != "auto" or options.pin or options.forbid or options.pins):
        raise UsageError("a plan, pins and forbidden layouts are about the axes of a mesh: give --mesh with them")
    axes: Axes = axes_of(mesh) if isinstance(mesh, int) else mesh
    try:
        if not isinstance(kind := getattr(torch.optim, options.optimizer, None), type):
            raise UsageError(
                f"--optimizer is a class of torch.optim, such as AdamW, SGD or Muon, not {options.optimizer}"
            )
        profile = profile_of_run("cuda", options.hardware, "eager", kind)
        pins = parse_pins(_table(options.pin), _table(options.forbid))
        request = Request(
            axes=axes,
            profile=profile,
            plan=plan,
            pins=replace(pins, plan=Plan.load(options.pins)) if options.pins else pins,
            memory_limit=limit_in_bytes(options.memory_limit, profile),
            loss_chunks=options.loss_chunks,
            linear_chunks=options.linear_chunks,
            microbatches=options.microbatches,
            offload_optimizer=options.offload_optimizer,
            precision=_policy(options.precision),
        ).on(axes)
        if request.stages and (refusal := pipeline_refusal(request.precision, request.outputs)):
            raise UsageError(refusal)
        if request.stages and options.microbatches is not None:
            raise UsageError("--microbatches is for meshes without an axis 'pp', whose pipeline chooses their number")
        if options.doublings < 0:
            raise UsageError(f"--doublings must not be negative, got {options.doublings}")
        request.constraints()
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    config = config_file(options.model)
    if config is not None:
        source = from_config(config, options.batch, options.seq)
    else:
        source = from_factory(options.model, options.batch, options.seq, options.seed, options.real_tensors)
    call = call_of(source.args, source.kwargs, source.loss_fn is not None)
    return source, replace(request, loss_fn=source.loss_fn), call, axes if mesh == 1 else mesh


def _devices(mesh: Axes | int) -> int:
    """How many devices a mesh has, or a number of them is."""
    return mesh if isinstance(mesh, int) else mesh_size(mesh)


def plan_of(text: str) -> Preset | Plan:
    """A preset's name, or the plan that a file holds."""
    for preset in PRESETS:
        if text == preset:
            return preset
    if Path(text).is_file():
        return Plan.load(text)
    raise UsageError(f"unknown plan {text!r}: expected one of {', '.join(PRESETS)}, or a plan's .json file")


def _table(texts: list[str]) -> dict[str, str]:
    table = {}
    for text in texts:
        pattern, equals, placements = text.rpartition("=")
        if not equals:
            raise ValueError(f"{text!r} is not a pin: write NAME=S0,R with one placement for each mesh axis")
        table[pattern] = placements
    return table


def _policy(precision: str | None) -> Any:
    if precision is None:
        return None
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=getattr(torch, precision), reduce_dtype=torch.float32)


def _presets(options: argparse.Namespace, request: Request) -> list[str]:
    if options.compare == "none":
        return []
    if options.compare != "all":
        names = options.compare.split(",")
        unknown = [name for name in names if name not in PRESETS]
        if unknown:
            raise UsageError(f"unknown preset {unknown[0]!r} in --compare: expected {', '.join(PRESETS)}")
        return names
    return [n for n in possible_presets(request.names) if n != request.plan]


def compare(
    job: Job,
    request: Request,
    presets: list[str],
    choice: MeshChoice | None = None,
    evaluator: Evaluator | None = None,
    cache: PlanCache | None = None,
) -> Comparison:
    """The plan that is asked for, and the presets beside it; each is searched and predicted.

    Args:
        choice: how the mesh was chosen, for the first plan to tell.
        evaluator: of this request, where it was searched already.
    """
    source, call, captured = job.source, job.call, job.captured
    plans: dict[str, tuple[Plan, Prediction]] = {}
    problems: dict[str, str] = {}
    evaluator = evaluator or Evaluator(request, captured, call)
    others = evaluator if request.pins == Pins() else Evaluator(replace(request, pins=Pins()), captured, call)
    for name in [request.origin, *presets]:
        chosen = not plans
        # Presets are compared without pins, within the same limit and with the same means that save memory.
        variant = request if chosen else replace(request, plan=name, pins=Pins())
        try:
            planner = Planner(source.model, variant, cache=cache)
            searched = evaluator if chosen else others.about(name)
            draft = draft_captured(planner, captured.copy(), call, _progress(name), searched, checked=chosen)
        except ValueError as error:
            if chosen:
                raise PlanError(str(error)) from error
            problems[name] = str(error)
            continue
        plan = draft.plan if variant.stages else draft.plan.with_reasons(PlanAgain(planner, call))
        plan = replace(plan, choice=choice or plan.choice) if chosen else plan
        plans[f"{name} (chosen)" if chosen else name] = plan, draft.prediction
    work = workload_of(captured, call, request.profile)
    return Comparison(type(source.model).__name__, work, request.profile, plans, problems, request.memory_limit)


def _progress(title: str) -> Progress:
    return Progress(title, is_printed=True)
