"""``ParallelModule``: the program behind ``nn.Module``'s and autograd's ordinary face."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Self, overload

import torch
from torch import nn

from autoparallel import _torch
from autoparallel.checkpoint.loading import Checkpoint, load
from autoparallel.checkpoint.pretrained import export, read
from autoparallel.checkpoint.saving import Save, World, save
from autoparallel.comm.waiting import RankMismatchError
from autoparallel.comm.world import mesh_text
from autoparallel.graph.calls import Call
from autoparallel.graph.hooks import guard_direct_calls
from autoparallel.graph.surroundings import TRACED
from autoparallel.plan import Plan
from autoparallel.runtime.calls.call import run_call
from autoparallel.runtime.calls.exchange import Exchange
from autoparallel.runtime.calls.kinds import KindMaker, Kinds
from autoparallel.runtime.calls.reader import CallReader
from autoparallel.runtime.calls.rows import Rows, RowSampler, batch_axes, count_samples, from_rows
from autoparallel.runtime.dtensors.summands import watch_summands
from autoparallel.runtime.face import Face
from autoparallel.runtime.gradients.accumulation import T, Window, windows
from autoparallel.runtime.norms.clipping import Clipper
from autoparallel.runtime.norms.limits import ClipGradNorm, Groups, Limit, Nonfinite, Norms
from autoparallel.runtime.ranks.randomness import STREAM, from_tensor, may_draw, to_tensor
from autoparallel.runtime.ranks.replicas import Replicas
from autoparallel.runtime.steps.host_steps import lay_in_host
from autoparallel.runtime.steps.optimizers import watch_optimizers
from autoparallel.runtime.whole import WholeModel, full_parameters


class ParallelModule(Face):
    """A model that trains on a whole mesh; made by :func:`autoparallel.compile`.

    It has the plain model's submodules, parameters and buffers, under their names; parameters are ``DTensor``s.
    A plain tensor given to it or returned by it is the global value, the same on every rank.
    """

    def __init__(
        self,
        maker: KindMaker,
        *,
        has_loss_fn: bool,
        clip_grad_norm: ClipGradNorm | None = None,
        check_inputs: int | None = None,
        check_replicas: int | None = None,
        methods: Sequence[str] = (),
        forward_methods: Sequence[str] = (),
    ) -> None:
        plain, store = maker.model, maker.store
        super().__init__(plain, frozenset(methods), frozenset(forward_methods))
        self._store = store
        replicas = Replicas(plain, lambda: maker.mesh, check_replicas) if check_replicas else None
        name, device = type(plain).__name__, maker.mesh.device_type
        self._kinds = Kinds(maker, Exchange(maker.agreement, store, name, device, check_inputs, replicas=replicas))
        self._calls = CallReader(self._kinds, has_loss_fn)
        self._entered = threading.RLock()
        self._clipper = Clipper(store, plain, clip_grad_norm)
        self._saving: Save | None = None
        self._whole = WholeModel(plain, store)
        guard_direct_calls(plain)
        watch_optimizers(self._clipper)
        self.__dict__["_plain"] = plain  # from now on other attributes are set on the plain model

    # -- calling ----------------------------------------------------------------------------------------------------

    @_torch.dynamo.left_by_dynamo("a model compiled by autoparallel runs as it is: compile(backend=...) compiles it")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program.

        With a ``loss_fn``, the last positional argument is the target and the loss is returned; without it, or
        without a target, the model's outputs.

        Raises:
            RankMismatchError: on every rank, when the ranks call with different inputs.
            CaptureError: when a new kind of call cannot be captured.
        """
        if not self._entered.acquire(blocking=False):
            raise RuntimeError(
                "the model is called while another thread is in a call of it: the threads would mix up what the ranks "
                "exchange. Call it from one thread at a time (a threading.Lock around the call)"
            )
        try:
            return run_call(self._kinds, lambda: self._read_call(args, kwargs), args, kwargs)
        finally:
            self._entered.release()

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Traces and plans for a kind of call without running it."""
        self._kinds.of(lambda: self._read_call(args, kwargs))

    def _read_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, str | None]:
        """A call, and why this rank cannot make it, if it cannot; raises on every rank where it is none on any."""
        try:
            return self._calls.read(args, kwargs, self._whole.entered)
        except RankMismatchError:  # on every rank already
            raise
        except Exception as error:  # noqa: BLE001 - raised on every rank
            self._kinds.exchange.of_error(error)

    # -- rows of each rank -------------------------------------------------------------------------------------------

    def sampler(
        self, dataset: Sized | int, batch_size: int, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False
    ) -> RowSampler:
        """The samples that each rank reads, so that together they read every batch once::

            loader = DataLoader(dataset, batch_sampler=model.sampler(dataset, 64, shuffle=True))
            for batch in loader:
                x, y = model.local_rows(batch)
                model(x, y).backward()

        Ranks between which the plan does not cut the batch read the same samples. Its ``state_dict()`` names the next
        sample by its number in the epoch, so that a run goes on there on any mesh; a loader that reads ahead
        (``num_workers``) must keep the state of what it has handed out, as torchdata's ``StatefulDataLoader`` does.

        Args:
            dataset: what has a length, or the length.
            batch_size: of the batch of all ranks.
            shuffle: gives every epoch an order of its own, which follows from ``seed`` and the epoch's number.
            drop_last: leaves the samples out that fill no batch at the end of an epoch.

        Raises:
            TypeError: for a dataset without a length.
            ValueError: when it is iterated, where a batch leaves a rank without a sample.
            RuntimeError: when it is iterated, where there is no plan yet.
        """
        return RowSampler(self._rows, count_samples(dataset), batch_size, shuffle, seed, drop_last)

    def local_rows(self, batch: T) -> T:
        """Makes a batch, for a call, of which each rank has brought its own rows.

        Every tensor whose first dim is the batch, as that of the first tensor is, becomes a ``DTensor`` of which this
        rank has its part. Where the ranks have different numbers of rows, as at the end of an epoch, all of them get
        all rows, so that nothing is padded and the loss is exactly that of the batch. Where the plan does not cut the
        batch, it is given back as it is. All ranks call it together.

        Args:
            batch: tensors in lists, tuples, dicts and the like.

        Raises:
            ValueError: where ranks that want the same rows have different numbers of them.
            RuntimeError: where there is no plan yet.
        """
        rows, maker = self._rows(), self._kinds.maker

        def all_counts(count: int) -> list[int]:
            (counts,) = self._kinds.exchange.of_other("local_rows()", count)
            return list(map(int, counts))

        return from_rows(batch, rows, maker.mesh, self._store.prefix, all_counts)

    def _rows(self) -> Rows:
        """Which rows this rank wants, by the first plan; all, in a pipeline."""
        if self.plan.pipeline is not None:
            return Rows.on(self._kinds.maker.mesh, ())
        return Rows.on(self._kinds.maker.mesh, batch_axes(next(iter(self._kinds)).runner.captured))

    # -- full parameters --------------------------------------------------------------------------------------------

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter, whole, by name: a stream, of which a bucket of a few megabytes is gathered at a time.

        It is for handing weights to what does not know the mesh, such as an inference engine. All ranks must go through
        all of it. A parameter that lies whole is given as it is, so copy what you mean to write to.

        Raises:
            RuntimeError: for parameters on the meta device, which get their values at the first call.
            RankMismatchError: on every rank, where some do something else.
        """
        self._begin_together("full_parameters()")
        with torch.no_grad():
            yield from full_parameters(self._store, self._kinds.maker.mesh, self._kinds.maker.owners)

    @contextlib.contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """Gathers all parameters for a while, for what only the plain model can do::

            with model.whole() as plain:
                tokens = plain.generate(prompt, max_new_tokens=20)

        Inside, the model's own modules have plain, full parameters, which are not trained; a parameter that lies whole
        is not copied. What calls have kept in attributes has no graph there, so that the model can be copied. What is
        written to them in place is kept: each rank takes its part when it leaves, so every rank must write the same.
        It is entered and left by all ranks together; nothing in between communicates. Entered within itself it does
        nothing.

        Raises:
            RuntimeError: for parameters on the meta device; when it is left, where a parameter was replaced inside
                instead of written to, or an optimizer has made a step.
            RankMismatchError: on every rank, where some do something else.
        """
        if not self._whole.entered:
            self._require_values("whole()")
        with self._whole(self.full_parameters) as plain:
            yield plain

    def _begin_together(self, what: str) -> None:
        """Begins what all ranks do together with the values of the parameters."""
        self._require_values(what)
        self._kinds.exchange.of_other(what)

    def _require_values(self, what: str) -> None:
        for name, parameter in self._store.parameters.items():
            if _torch.dtensor.local_of(parameter).is_meta:
                raise RuntimeError(
                    f"{what}: {name} is on the meta device until the first call is planned: pass example_inputs to "
                    "compile(), or call model.prepare(*inputs) before"
                )

    # -- gradients --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients without communication; the next backward outside reduces their sum, once."""
        watch_summands()
        before, self._store.synchronise = self._store.synchronise, False
        try:
            yield
        finally:
            self._store.synchronise = before

    def accumulate(self, steps: int, batches: Iterable[T], *, weights: str = "loss") -> Iterator[Window[T]]:
        """Cuts ``batches`` into windows of ``steps`` microbatches, each one step of the optimizer::

            for window in model.accumulate(4, loader):
                for x, y in window:
                    model(x, y).backward()          # no division: the window divides
                model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()

        Gradients are reduced once, in the window's last backward (or as ``model.plan`` says). They are those of the
        mean loss over the whole window: of a mean over valid tokens, every token counts alike, however they are spread
        over microbatches and ranks. The last window may be shorter.

        Args:
            steps: microbatches in a window.
            batches: any iterable; it is read one batch ahead.
            weights: "loss" weighs a microbatch by what its loss is a mean over: found in the traced loss (a mean, a
                cross-entropy with ignored targets, a sum divided by a count), or returned by a ``loss_fn`` that returns
                ``(sum, count)``, an integer count. A loss that is a sum is just added up. "equal" takes the mean of the
                losses.

        Raises:
            ValueError: when the weight of the loss cannot be told; before anything is sent.
            RuntimeError: when gradients were left over before, or are cleared in the middle of, a window; at its end,
                when a loss adds up means over numbers whose ratio was another in each microbatch.
        """
        watch_summands()
        return windows(self._store, steps, batches, weights)

    @overload
    def grad_norm(self, norm_type: float = 2.0, groups: None = None) -> torch.Tensor: ...
    @overload
    def grad_norm(self, norm_type: float = 2.0, *, groups: Groups) -> dict[str, torch.Tensor]: ...
    @overload
    def grad_norm(self, norm_type: float, groups: Groups) -> dict[str, torch.Tensor]: ...
    def grad_norm(self, norm_type: float = 2.0, groups: Groups | None = None) -> torch.Tensor | dict[str, torch.Tensor]:
        """The global norm of all gradients, without clipping; one all-reduce, whatever the groups.

        Args:
            norm_type: p of the p-norm; positive, or ``inf``.
            groups: names of norms to patterns of parameter names, such as ``{"encoder": "encoder.*", "heads": ["lm.*",
                "value.*"]}``; or ``"module"`` for the model's direct submodules, or ``"parameter"``. A parameter may be
                in several groups, and is found by all names of a tied weight.

        Returns:
            The norm, a scalar on the device, the same on every rank; with ``groups``, a dict of such norms. A group
            without a gradient has norm 0.

        Raises:
            ValueError: for a p that is not positive, or a pattern that no parameter matches.
            RuntimeError: before any backward, inside ``no_sync()``, or for a replaced gradient that lies otherwise.
        """
        return self._clipper.norm(norm_type, groups)

    @overload
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = ..., error_if_nonfinite: bool = ..., *, nonfinite: Nonfinite = ...
    ) -> torch.Tensor: ...
    @overload
    def clip_grad_norm_(
        self,
        max_norm: Mapping[str, float],
        norm_type: float = ...,
        error_if_nonfinite: bool = ...,
        *,
        nonfinite: Nonfinite = ...,
    ) -> dict[str, torch.Tensor]: ...
    @overload
    def clip_grad_norm_(
        self,
        max_norm: torch.optim.Optimizer,
        norm_type: float = ...,
        error_if_nonfinite: bool = ...,
        *,
        nonfinite: Nonfinite = ...,
    ) -> list[torch.Tensor]: ...
    def clip_grad_norm_(
        self,
        max_norm: Limit,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        nonfinite: Nonfinite = "propagate",
    ) -> Norms:
        """Scales all gradients so that their global norm is at most ``max_norm``; one all-reduce.

        Args:
            max_norm: the limit. Or limits by pattern of parameter names, such as ``{"encoder.*": 1.0, "*": 0.5}``, each
                for the norm of the parameters that match it and none before it. Or an optimizer, for the
                ``"max_norm"`` of each of its ``param_groups``. What has no limit is left as it is.
            norm_type: p of the p-norm; positive, or ``inf``.
            error_if_nonfinite: the same as ``nonfinite="raise"``.
            nonfinite: what to do when a norm is nan or inf. ``"propagate"``: scale all the same, as torch does.
                ``"raise"``: on every rank (this waits for the device). ``"skip"``: all gradients become zero, decided
                on the device, and the optimizer's next step changes nothing: no parameter, whatever its weight decay
                or momentum, and no state. A step with a closure sees gradients of zero instead.

        Returns:
            The global norm before clipping, a scalar on the device, the same on every rank; for limits by pattern a
            dict of norms, for an optimizer a list with the norm of each group.

        Raises:
            ValueError: for a limit that is negative or nan, a p that is not positive, a pattern that matches nothing.
            RuntimeError: before any backward, inside ``no_sync()``, for a non-finite norm when asked, or for a gradient
                that the user has replaced by one that lies otherwise than its parameter.
        """
        return self._clipper.clip_norm(max_norm, norm_type, error_if_nonfinite, nonfinite)

    @property
    def last_grad_norm(self) -> Norms | None:
        """What the last clipping returned: ``clip_grad_norm_``'s, or that of the last step of an optimizer when the
        model was compiled with ``clip_grad_norm``; None before the first."""
        return self._clipper.last_norm

    def clip_grad_value_(self, value: float) -> None:
        """Clamps every element of every gradient to ``[-value, value]``; no communication."""
        self._clipper.clip_value(value)

    # -- the face of nn.Module --------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What was decided for the first kind of call that trains; until there is one, for the first kind.

        Raises:
            RuntimeError: before the first call, unless compile() got example inputs.
        """
        if self._kinds.plan is None:
            raise RuntimeError("there is no plan yet: call the model once, or pass example_inputs to compile()")
        return self._kinds.plan

    def train(self, mode: bool = True) -> Self:
        """Calls the plain model's ``train``, by which its class may leave a frozen part in evaluation.

        Warns where gradients of an unfinished step are left over: they are kept, and the next step would use them.
        """
        if not mode and self._store.has_pending and self._store.window is None:
            warnings.warn(
                "microbatches were accumulated under no_sync() that no step has used: at the end of the data, leave "
                "no_sync() for the last backward and step, or let model.accumulate() cut the windows",
                stacklevel=2,
            )
        return super().train(mode)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save(
        self, path: str | Path, *, step: int = 0, keep: int | None = None, asynchronous: bool = False, **states: Any
    ) -> Save:
        """Saves a checkpoint, from which a run goes on with :meth:`load`, on any mesh; all ranks must call it.

        It is a new folder in ``path``, which all ranks share. A save that fails or is killed leaves the others whole.

        Args:
            step: told again by :meth:`load`.
            keep: removes all but so many of the newest checkpoints, when this one is complete. None keeps all.
            asynchronous: only copies what is saved, to the host's memory, and writes it while the training goes on;
                ``wait()`` of what is returned, or the next save, waits for it and raises what went wrong.
            states: what else there is to save, by name: optimizers, schedulers, loaders, scalers and whatever has a
                ``state_dict()`` (of a loader, the first rank's), and numbers, texts, and lists and dicts of them.

        Raises:
            RuntimeError: a ``CheckpointError``, or ``RankMismatchError`` on the ranks that are told of another's: when
                it cannot be written.
            TypeError, ValueError: for a state that a checkpoint cannot hold.
        """
        if self._saving is not None and not self._saving.is_done:
            self._saving.wait()
        self._saving = save(self._world(), path, step, keep, asynchronous, states)
        if not asynchronous:
            self._saving.wait()
        return self._saving

    def load(self, path: str | Path, **states: Any) -> Checkpoint:
        """Loads a checkpoint, or the newest complete one in a folder; all ranks must call it.

        The model may lie otherwise than it did, on another mesh and by another plan. Everything that is loaded is
        read and compared with its digests first.

        Args:
            states: the optimizers and others to load into, by the names that they were saved under.

        Returns:
            Its path, its step, and the plain values that were saved.

        Raises:
            RuntimeError: a ``CheckpointError``, or ``RankMismatchError`` on the ranks that are told of another's: when
                there is no checkpoint, when it is damaged, or of another model. Nothing is changed then.
        """
        if self._saving is not None and not self._saving.is_done:
            self._saving.wait()
        loaded = load(self._world(), path, states)
        for state in states.values():
            if isinstance(state, torch.optim.Optimizer) and self._store.offloads_states:
                lay_in_host(state)
        return loaded

    def export_hf(self, path: str | Path, max_shard_size: int | str = "5GB") -> None:
        """Writes the model as ``from_pretrained`` reads it; all ranks must call it, and share the folder.

        Safetensors files, an index where there are several, and the config. Every rank writes its own part: nothing is
        gathered. A tied weight is written once, a stack of experts as ``transformers`` keeps it. A model in the folder
        is replaced when the new one is written. Of a module that is not of ``transformers`` there is no config.

        Args:
            max_shard_size: of a file, in bytes or as "5GB"; a tensor that is larger has a file of its own.

        Raises:
            RuntimeError: a ``CheckpointError``, or ``RankMismatchError`` on the ranks that are told of another's: when
                nothing can be written there, and for adapters.
        """
        self._begin_together("export_hf()")
        export(self._world(), self._plain, Path(path), max_shard_size)

    def save_pretrained(self, save_directory: str | Path, max_shard_size: int | str = "5GB") -> None:
        """Does what :meth:`export_hf` does, under the name that it has in ``transformers``."""
        self.export_hf(save_directory, max_shard_size)

    def load_hf(self, path: str | Path) -> None:
        """Loads what ``save_pretrained`` or :meth:`export_hf` wrote; all ranks must call it.

        Every rank reads its own part, in the dtype that the model has. Names and shapes are compared before anything is
        changed: the folder must hold all of the model's tensors and no others.

        Raises:
            RuntimeError: a ``CheckpointError`` that names the file, or ``RankMismatchError`` on the ranks that are told
                of another's: for a folder that is of another model, not complete or damaged.
        """
        self._begin_together("load_hf()")
        read(self._world(), self._plain, Path(path))

    def _world(self) -> World:
        return World(self, self._kinds.maker.mesh, self._kinds.exchange.agreement)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Adds the place in the stream of random numbers, where the model may draw."""
        self._plain._save_to_state_dict(destination, prefix, keep_vars)
        if any(kind.runner.captured.draws for kind in self._kinds) or may_draw(self._plain):
            destination[self._name_of_place(prefix)] = to_tensor(STREAM.place())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Goes on drawing from where the state was saved; a state without a place leaves the stream as it is."""
        saved = state_dict.pop(self._name_of_place(prefix), None)
        self._plain._load_from_state_dict(state_dict, prefix, *others)
        if saved is not None:
            STREAM.move(from_tensor(saved))

    def _name_of_place(self, prefix: str) -> str:
        """Beside the plain model's own extra state, if it has one."""
        has_own = type(self._plain).get_extra_state is not nn.Module.get_extra_state
        return f"{prefix}random._extra_state" if has_own else f"{prefix}_extra_state"

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A model of its own on the same mesh, with the same values, whose parameters lie as this one's do; all ranks
        make it together. It has its own gradients and no hooks on parameters. Its calls are captured anew."""
        if id(TRACED) in memo:
            return memo.get(id(self._plain), self)
        self._begin_together("copy.deepcopy()")
        with torch.inference_mode(False):
            plain = copy.deepcopy(self._plain, memo)
        replicas = self._kinds.exchange.replicas
        memo[id(self)] = module = ParallelModule(
            self._kinds.maker.copied(plain),
            has_loss_fn=self._calls.has_loss_fn,
            clip_grad_norm=self._clipper.in_step,
            check_inputs=self._kinds.exchange.check_inputs,
            check_replicas=None if replicas is None else replicas.every,
            methods=tuple(self._methods),
            forward_methods=tuple(self._forward_methods),
        )
        return module

    def extra_repr(self) -> str:
        mesh = self._kinds.maker.mesh
        return f"parallel over {mesh_text(list(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)))}"
