"""Running a pipeline: every rank goes through its part of a schedule, microbatch by microbatch.

[Note: a call of a pipeline] A call in training mode runs the whole schedule, forward and backward, and returns the loss
of the whole batch, the same on every rank.  ``backward()`` of that loss computes nothing any more: it hands the
gradients out (see [Note: gradients of a schedule] in ``stages``).  So the loop around a pipeline is that around any
model.  In ``eval()`` and under ``no_grad()`` only forwards run.

[Note: the loss of microbatches] The loss of the whole batch is the mean of the microbatches' losses, weighted by what
each of them is a mean over (see ``passes.weigh_loss``).  The sum of the weights is known only at the end.  So the
gradients are computed with each weight over a fixed reference, and divided when they are handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from autoparallel.comm import ranges
from autoparallel.comm.communicator import Wait
from autoparallel.comm.groups import group_name, settle
from autoparallel.comm.waiting import cause_elsewhere
from autoparallel.graph.calls import (
    Call,
    UnevenSizeError,
    batch_dim,
    count_microbatches,
    micro_specs,
    microbatch,
    require_divisible,
    sizes_of,
)
from autoparallel.graph.captured import InputSpec
from autoparallel.graph.losses import explain_apart, have_one_ratio
from autoparallel.operators import RandomState, draw_from
from autoparallel.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    INPUT,
    KINDS,
    SEND,
    WEIGHT,
    Action,
    Transfer,
    actions_of,
    forwards_of,
    play,
)
from autoparallel.placements import Layout, to_dtensor_placements
from autoparallel.placements.redistribution import Redistributor
from autoparallel.program.program import LocalProgram
from autoparallel.program.stages import StagedProgram
from autoparallel.runtime.gradients.accumulation import expected_count
from autoparallel.runtime.gradients.store import GradientStore
from autoparallel.runtime.programs.microbatches import Gradients, HandOut, shared_forms
from autoparallel.runtime.programs.outputs import NotKept, anchor_of, refuse_gradient
from autoparallel.runtime.programs.stages import Stage, StageGradients, form_of
from autoparallel.runtime.programs.tied import TiedParameters, find_ties
from autoparallel.runtime.ranks.messages import Form, pack, unpack
from autoparallel.text import LOGGER

T = TypeVar("T")

AHEAD = 8
"""How many values may be on their way from a rank before it waits for the first of them, and lets go of it."""


_ONLY_LOSS = (
    "differentiates its loss only, in training mode: pass loss_fn to compile() and the target to the call, "
    "or have the model return its loss as a scalar, and call model.train() before"
)


_KEPT = (
    "a call that runs in microbatches keeps outputs beside its loss only when the model is compiled with "
    "outputs='gather'"
)


_CUT_INTO_MANY = (
    "a training call runs in %d microbatches, because %d do not divide its rows, and takes long\n"
    "What to change: drop_last=True in the data loader, or a batch size with smaller factors."
)

MANY = 4
"""How many times as many microbatches as usual are worth a warning."""


class PipelineError(RuntimeError):
    """A pipeline that cannot go on: another rank is gone, or has stopped."""


@dataclass
class _Run:
    """What one call of the pipeline has computed so far.

    Attributes:
        scale: of the loss.
        reference: about what the weights of all microbatches add up to.
        values: what has arrived for a stage: (kind, crossing, stage it comes to or came from, microbatch).
        arriving: the same, still under way.
        leaving: what is to be sent.
        sending: sends under way.
        buffers: buffers as the last microbatch has left them.
        results: for each kept result and the loss, its value by microbatch.
    """

    leaves: list[list[Any]]
    forms: dict[int, Form]
    random: RandomState
    differentiate: bool
    count: int
    scale: float
    reference: float
    values: dict[tuple[str, int, int, int], torch.Tensor] = field(default_factory=dict)
    arriving: dict[tuple[str, int, int, int], tuple[Wait, Transfer]] = field(default_factory=dict)
    leaving: dict[tuple[str, int, int, int], torch.Tensor] = field(default_factory=dict)
    sending: list[tuple[Wait, Transfer]] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    results: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)


class PipelineRunner:
    """One kind of call of a model in stages; this rank's part of it.

    Args:
        staged: what all ranks know.
        stages: this rank's stages, by their place in the pipeline.
        store: the gradients of the parameters that lie on this rank.
        tied: the parameters that several stages use.

    Attributes:
        scaler: what scales the loss, if anything: gradients are computed with its scale, and handed out without it.
        usual: how many microbatches other calls are cut into.
        why_once: why its loss can be differentiated once only.
    """

    why_once = (
        "microbatches compute their gradients in the forward\nWhat to change: plan it without a pipeline and with "
        "microbatches=1"
    )

    def __init__(
        self,
        staged: StagedProgram,
        stages: Mapping[int, Stage],
        store: GradientStore,
        tied: TiedParameters,
    ) -> None:
        self.staged, self.stages, self.store, self.tied = staged, dict(stages), store, tied
        self.plan = staged.plan
        self.captured = captured = staged.captured
        self.communicator, self.axis, self.rank = tied.communicator, tied.axis, tied.rank
        self.device = torch.device(store.mesh.device_type)
        whole: Layout = ()
        self.specs = [(to_dtensor_placements(whole), whole)] * len(captured.results)
        used = {name: None for program in staged.programs for name in program.chains}
        self.used = tuple(name for name in used if name in store.parameters)
        self.loss, self._loss_weight = captured.objective, captured.weight
        # The number, among the results, of what the loss of a microbatch weighs; none where losses just add up.
        self._adds_up = self._loss_weight.kind == "sum" or self._loss_weight.from_call
        self._weight = None if self._adds_up else self._loss_weight.output
        self._weights = () if self._adds_up else self._loss_weight.outputs
        self.scaler: torch.amp.GradScaler | None = None
        self.usual = self.plan.microbatches
        self._what = "a pipeline" if self.plan.axis else "a call that runs in microbatches"
        self._steps: dict[tuple[bool, int], tuple[Action | Transfer, ...]] = {}
        self._forms: dict[Any, dict[int, Form]] = {}
        self._counts: dict[Any, int] = {}  # by shapes: the microbatches of a call that is not differentiated
        self._divisors = [divisor for program in staged.programs for divisor in program.divisors]

    # -- before a call ----------------------------------------------------------------------------------------------

    def require_fits(self, call: Call) -> None:
        """Raises ValueError when a call cannot be cut into microbatches, or those over the mesh; an
        :class:`UnevenSizeError` where another plan may cut it."""
        for spec, layout in zip(call.specs, call.layouts, strict=True):
            if layout is not None:
                raise ValueError(f"{self._what} takes plain tensors, the same on every rank, not DTensors")
            if isinstance(spec, InputSpec) and spec.requires_grad:
                raise ValueError(f"{self._what} does not differentiate the model's inputs: detach them")
        count = self._microbatches(call)
        if call.batch % count:
            raise UnevenSizeError(f"a batch of {call.batch} rows does not divide into {count} microbatches")
        actual = sizes_of(self.captured, micro_specs(call.specs, count))
        require_divisible(self._divisors, actual, call.batch // count, self.captured.lengths)

    def _microbatches(self, call: Call) -> int:
        """How many microbatches a call is cut into: where nothing is differentiated, as many as the plan can run, or
        one, where more would not make what the batch does."""
        if self._differentiates(call):
            return self.plan.cut(call.batch)
        if self.staged.is_whole:
            return 1
        if call.shapes not in self._counts:
            counts = count_microbatches(self.plan.microbatches, call.batch, lambda m: self._divides(call, m))
            self._counts[call.shapes] = counts
        return self._counts[call.shapes]

    def _divides(self, call: Call, count: int) -> bool:
        """Whether a microbatch of so many divides over the mesh."""
        actual = sizes_of(self.captured, micro_specs(call.specs, count))
        return all(int(size.subs(actual)) % pieces == 0 for size, pieces in self._divisors)

    def _differentiates(self, call: Call) -> bool:
        return self.loss is not None and call.trains

    def steps(self, differentiate: bool, count: int) -> tuple[Action | Transfer, ...]:
        """What this rank does in a call of so many microbatches."""
        key = differentiate, count
        if key not in self._steps:
            make = actions_of if differentiate else forwards_of
            lists = make(self.plan.schedule, self.plan.ranks, self.plan.count, count)
            played = play(lists, self.plan.rank_of, self.staged.passings(differentiate))
            if differentiate and count > MANY * self.usual and not self.rank:
                LOGGER.warning(_CUT_INTO_MANY, count, self.usual)
            self._steps[key] = played.steps[self.rank]
        return self._steps[key]

    # -- a call -----------------------------------------------------------------------------------------------------

    def run(self, call: Call, random: RandomState) -> list[Any]:
        """The outputs of the whole batch (see [Note: a call of a pipeline])."""
        settle(self.store.prefix)
        count, differentiate = self._microbatches(call), self._differentiates(call)
        specs = micro_specs(call.specs, count)
        scale = self.scaler.get_scale() if self.scaler is not None and differentiate else 1.0
        leaves = [microbatch(call, m, count) for m in range(count)]
        reference = expected_count(specs, call.batch // count) * count
        run = _Run(leaves, self._forms_of(specs), random, differentiate, count, scale, reference)
        try:
            lent = self._exchange(self.tied.lend)
            for stage in self.stages.values():
                stage.begin(differentiate)
            for step in self.steps(differentiate, count):
                with ranges.named(lambda step=step: _name_of(step)):  # type: ignore[misc]
                    self._do(run, step)
            for wait, transfer in run.sending:
                self._wait(wait, transfer)
            sums = {i: stage.end() for i, stage in self.stages.items()}
            totals = self._exchange(lambda: self.tied.merge(sums)) if differentiate else {}
            self._exchange(lent)
            combined = self._combine(run)
            self._share(run, combined, call)
            if (apart := self._loss_weight.apart) and combined[self._loss_weight.outputs[0]] < 0:
                raise RuntimeError(explain_apart(apart))
        except BaseException:
            for stage in self.stages.values():
                stage.forget()
            raise
        return self._outputs(run, combined, sums, totals)

    def _forms_of(self, specs: Sequence[Any]) -> dict[int, Form]:
        key = tuple(s.shape for s in specs if isinstance(s, InputSpec))
        if key not in self._forms:
            sizes, actual = tuple(self.store.mesh.shape), sizes_of(self.captured, specs)
            self._forms[key] = {
                c.number: form_of(c, self.staged.programs[c.targets[0]], sizes, actual) for c in self.staged.crossings
            }
        return self._forms[key]

    def _do(self, run: _Run, step: Action | Transfer) -> None:
        if isinstance(step, Transfer):
            self._transfer(run, step)
        elif step.kind == FORWARD:
            self._forward(run, step)
        elif step.kind == WEIGHT:
            self.stages[step.stage].weights(step.microbatch)
        else:
            self._backward(run, step)

    def _transfer(self, run: _Run, transfer: Transfer) -> None:
        key = _key(transfer)
        try:
            if transfer.what == SEND:
                wait = self.communicator.send(run.leaving.pop(key), self.axis, transfer.peer)
                run.sending.append((wait, transfer))
                if len(run.sending) > AHEAD:
                    self._wait(*run.sending.pop(0))
            else:
                form = run.forms[transfer.value]
                buffer = torch.empty(form.shape, dtype=form.dtype, device=self.device)
                run.arriving[key] = self.communicator.receive(buffer, self.axis, transfer.peer), transfer
        except RuntimeError as error:
            self._fail(transfer, error)

    def _wait(self, wait: Wait, transfer: Transfer) -> torch.Tensor:
        try:
            return wait()
        except RuntimeError as error:
            self._fail(transfer, error)

    def _fail(self, transfer: Transfer, error: BaseException) -> NoReturn:
        forward = transfer.kind == FORWARD
        here = transfer.source if (transfer.what == SEND) == forward else transfer.target
        other = transfer.target if here == transfer.source else transfer.source
        what = "an activation" if forward else "a gradient"
        way = "sending" if transfer.what == SEND else "receiving"
        to = "to" if transfer.what == SEND else "from"
        raise PipelineError(
            f"{self._name(here)} failed {way} {what} of microbatch {transfer.microbatch} {to} stage {other} on rank "
            f"{self.communicator.ranks(self.axis)[transfer.peer]}: that rank is gone or has stopped ({_reason(error)})"
        ) from error

    def _name(self, stage: int) -> str:
        return self.stages[stage].name if stage in self.stages else f"stage {stage}"

    def _take_arrival(self, run: _Run, key: tuple[str, int, int, int]) -> torch.Tensor:
        if key in run.arriving:
            return self._wait(*run.arriving.pop(key))
        return run.values.pop(key)

    def _forward(self, run: _Run, action: Action) -> None:
        stage, m = self.stages[action.stage], action.microbatch
        received = {
            c.number: self._take_arrival(run, (FORWARD, c.number, stage.index, m)) for c in stage.graph.incoming
        }
        with draw_from(replace(run.random, microbatch=m, microbatches=run.count)):
            changed = {path: run.buffers[path] for path in run.buffers if path not in self.captured.steady}
            outputs = stage.forward(m, run.leaves[m], received, changed, run.differentiate)
        run.buffers.update(outputs.buffers)
        for i, value in outputs.results.items():
            run.results.setdefault(i, {})[m] = value
        for crossing in (*stage.graph.outgoing, *stage.graph.incoming):
            value = outputs.outgoing[crossing.number] if crossing.source == stage.index else received[crossing.number]
            for target in crossing.takers(stage.index):
                local = self.plan.rank_of(target) == self.rank
                (run.values if local else run.leaving)[FORWARD, crossing.number, target, m] = value.detach()

    def _backward(self, run: _Run, action: Action) -> None:
        stage, m = self.stages[action.stage], action.microbatch
        grads = {
            c.number: [
                self._take_arrival(run, (BACKWARD, c.number, t, m)) for t in c.takers(stage.index) if c.returns(t)
            ]
            for c in (*stage.graph.outgoing, *stage.graph.incoming)
        }
        back = stage.backward(m, self._seed(run, stage, m), grads, action.kind == INPUT)
        for crossing in stage.graph.incoming:
            if crossing.returns(stage.index):
                parts = [*([back[crossing.number]] if crossing.number in back else ()), *grads[crossing.number]]
                giver = crossing.givers[crossing.targets.index(stage.index)]
                local = self.plan.rank_of(giver) == self.rank
                key = BACKWARD, crossing.number, stage.index, m
                (run.values if local else run.leaving)[key] = sum(parts[1:], parts[0])

    # -- the loss ---------------------------------------------------------------------------------------------------

    def _seed(self, run: _Run, stage: Stage, microbatch: int) -> Any:
        """What the loss of a microbatch is multiplied by (see [Note: the loss of microbatches])."""
        if stage.loss is None or run.count == 1 or self._adds_up:
            return run.scale
        if self._weight is None:
            return run.scale / run.count
        return self._loss_weight.divisor(run.results[self._weight][microbatch].double()) * (run.scale / run.reference)

    def _combine(self, run: _Run) -> dict[int, torch.Tensor]:
        """The results of the whole batch that this rank's stages have made."""
        combined: dict[int, torch.Tensor] = {}
        parts = {i: [values[m] for m in range(run.count)] for i, values in run.results.items()}
        for i, values in parts.items():
            if run.count == 1:
                combined[i] = values[0]
            elif i == self.loss and self._weight is not None:
                losses, weights = torch.stack(values), torch.stack(parts[self._weight]).to(values[0].dtype)
                sums = losses * self._loss_weight.divisor(weights)
                if not (self._loss_weight.least or self._loss_weight.added):
                    sums = torch.where(weights == 0, 0, sums)
                combined[i] = sums.sum() / self._loss_weight.divisor(weights.sum())
            elif i == self.loss and not self._adds_up:
                combined[i] = torch.stack(values).mean()
            elif i == self.loss or i in self._weights:
                combined[i] = sum(values[1:], values[0])
            elif (dim := batch_dim(self.captured, i)) >= 0:
                combined[i] = torch.cat(values, dim)
            else:
                combined[i] = values[-1]
        if run.count > 1 and self._loss_weight.apart and self.loss in parts and not self._goes_together(parts):
            combined[self._loss_weight.outputs[0]].fill_(-1)  # which tells all ranks
        return combined

    def _goes_together(self, parts: Mapping[int, Sequence[torch.Tensor]]) -> bool:
        """Whether the means of the loss are over numbers of the same ratio in all microbatches, which are as large."""
        same = torch.ones(len(next(iter(parts.values()))), dtype=torch.float64, device=self.device)
        columns = [
            same if w.output is None else torch.stack([*parts[w.output]]).double() for w in self._loss_weight.each
        ]
        return have_one_ratio(torch.stack(columns, 1))

    # -- after the schedule -----------------------------------------------------------------------------------------

    def _share(self, run: _Run, combined: dict[int, torch.Tensor], call: Call) -> None:
        """Tells all ranks of the pipeline what one of them has made: the loss, outputs that are kept, buffers."""
        actual = sizes_of(self.captured, call.specs)
        sends: list[Wait] = []
        for stage, graph in enumerate(self.staged.graphs if self.plan.ranks > 1 else ()):
            wanted, forms = shared_forms(self.captured, graph, actual)
            if not wanted:
                continue
            root = self.plan.rank_of(stage)
            if root == self.rank:
                paths = self.captured.mutated
                values = [run.buffers[paths[i]] if i < len(paths) else combined[i] for i in wanted]
                packed = pack(values)
                peers = (peer for peer in range(self.plan.ranks) if peer != root)
                sends += [self.communicator.send(packed, self.axis, peer) for peer in peers]
            else:
                received = self._receive(forms, root)
                for i, value in zip(wanted, received, strict=True):
                    if i < len(self.captured.mutated):
                        run.buffers[self.captured.mutated[i]] = value
                    else:
                        combined[i] = value
        for i, path in enumerate(self.captured.mutated):
            combined[i] = run.buffers[path]
        for wait in sends:
            self._exchange(wait, "sending its results after the schedule")

    def _receive(self, forms: Sequence[Form], root: int) -> list[torch.Tensor]:
        packed = torch.empty(sum(form.bytes for form in forms), dtype=torch.uint8, device=self.device)
        wait = self.communicator.receive(packed, self.axis, root)
        return unpack(self._exchange(wait, "receiving the results after the schedule"), forms)

    def _exchange(self, exchange: Callable[[], T], what: str = "exchanging the parameters that stages share") -> T:
        """What an exchange with other ranks returns; its error names this rank's stages."""
        try:
            return exchange()
        except RuntimeError as error:
            names = ", ".join(stage.name for stage in self.stages.values())
            raise PipelineError(
                f"{names} failed {what}: another rank is gone or has stopped ({_reason(error)})"
            ) from error

    def _outputs(
        self,
        run: _Run,
        combined: dict[int, torch.Tensor],
        sums: dict[int, dict[str, torch.Tensor]],
        totals: dict[str, torch.Tensor],
    ) -> list[Any]:
        first = len(self.captured.mutated)
        outputs: list[Any] = [
            combined[i] if i in combined else NotKept(f"output {i - first} of the model", _KEPT)
            for i in range(len(self.specs))
        ]
        if run.differentiate:
            assert self.loss is not None
            divisor = self._divisor(run, combined)
            call = Gradients(self.stages, self.store, self.tied, sums, totals, divisor)
            parameters = {name: self.store.parameters[name] for name in self.used}
            outputs[self.loss] = HandOut.apply(outputs[self.loss], call, parameters, *parameters.values())
        if torch.is_grad_enabled():
            others = {*self.captured.flowing, *self.captured.detached} - ({self.loss} if run.differentiate else set())
            if tensors := [i for i in others if isinstance(outputs[i], torch.Tensor)]:
                anchor = anchor_of(map(self.store.parameters.__getitem__, self.used))
                for i in tensors:
                    outputs[i] = refuse_gradient(outputs[i], f"{self._what} {_ONLY_LOSS}", anchor)
        return outputs

    def _divisor(self, run: _Run, combined: Mapping[int, torch.Tensor]) -> torch.Tensor | float:
        """What the summed gradients are to be divided by."""
        if self._weight is None or run.count == 1:
            return run.scale
        total = combined[self._weight].double()
        least = 0.0 if self._loss_weight.added else self._loss_weight.least or 1.0
        return (torch.where(total == 0, least, total) + self._loss_weight.added) * (run.scale / run.reference)


def _reason(error: BaseException) -> str:
    """What another rank has raised, if it said so; else how the exchange with it failed."""
    return cause_elsewhere() or str(error).splitlines()[0]


def _name_of(step: Action | Transfer) -> str:
    """A step of the schedule, as a profile shows it."""
    if isinstance(step, Transfer):
        what = "value" if step.kind == FORWARD else "gradient"
        return f"{step.what} {what} of microbatch {step.microbatch} between stages {step.source} and {step.target}"
    return f"stage {step.stage}: {KINDS[step.kind]} of microbatch {step.microbatch}"


def _key(transfer: Transfer) -> tuple[str, int, int, int]:
    return transfer.kind, transfer.value, transfer.target, transfer.microbatch


def attach_stages(
    staged: StagedProgram,
    store: GradientStore,
    plain: nn.Module,
    prefix: str,
    owners: Mapping[str, int],
    redistributor: Redistributor,
    make_body: Callable[[LocalProgram], Callable[..., Any]],
) -> PipelineRunner:
    """This rank's part of the stages, attached to its parameters.

    Args:
        prefix: the name under which the whole mesh is bound.
        owners: the rank on the pipeline's axis on which each parameter lies.
        make_body: as :class:`Runner` takes it.
    """
    plan = staged.plan
    group = group_name(prefix, [plan.axis], [0]) if plan.axis else None
    tied = TiedParameters(find_ties(staged, owners, redistributor), store, group)
    loss = staged.captured.objective
    stages = {}
    for index in plan.stages_of(tied.rank):
        graph, program = staged.graphs[index], staged.programs[index]
        borrowed = {name: tied.borrowed[name] for name in program.chains if name in tied.borrowed}
        objective = loss if loss in graph.results else None
        gradients = StageGradients(store, borrowed, alone=plan.count == 1)
        stages[index] = Stage(index, graph, program, gradients, plain, make_body, objective)
    return PipelineRunner(staged, stages, store, tied)
