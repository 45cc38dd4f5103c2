"""Entries of dicts, lists and deques that calls read and change, and tuples that they replace."""

from __future__ import annotations

import copy
import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.capture.programs.changing_attributes import over_lengths
from tests.capture.programs.inplace import Two
from tests.capture.programs.loops import finish
from tests.capture.registry import loop, program
from tests.capture.runner import Run, numbers, sgd


def over_calls(run: Run, plain: nn.Module, change: Callable[[Any, int], None] | None = None) -> None:
    """Twelve steps of four lengths and two batches, and evaluation in between.

    Args:
        change: what the loop does to the model before a step.
    """
    lengths = [5 + step // 3 for step in range(12)]
    over_lengths(run, plain, lengths, rows=(6, 4, 4, 4), change=change, every=5)


class Stats(Two):
    """Numbers by their names, by which a call computes."""

    def __init__(self) -> None:
        super().__init__()
        self.stats: dict[str, Any] = {"calls": 0, "a.rows": 0, "tau": 1.0, "phase": "warm"}

    def forward(self, x: Tensor) -> Tensor:
        self.stats["calls"] += 1
        self.stats["a.rows"] += x.shape[0]
        self.stats["tau"] = max(0.5, self.stats["tau"] * 0.9)
        if self.stats["tau"] < 0.6:
            self.stats["phase"] = "cold"
        return self.b(self.a(x) / self.stats["tau"]) / self.stats["calls"]


@loop(ranks=True)
def statistics_are_counted(run: Run) -> None:
    over_calls(run, Stats())


@loop()
def statistics_are_reset(run: Run) -> None:
    """By another dict, whose order is another, and by other numbers."""

    def reset(model: Any, step: int) -> None:
        if step == 3:
            model.stats = {"tau": 1.0, "phase": "warm", "calls": 0, "a.rows": 0, "more": 1}
        elif step == 5:
            model.stats.update(calls=-7, tau=2.0)
        elif step == 8:
            del model.stats["more"]

    over_calls(run, Stats(), reset)


@loop(ranks=True)
def counters_begin_empty(run: Run) -> None:
    """They are emptied after an epoch."""

    class Counting(Two):
        def __init__(self) -> None:
            super().__init__()
            self.counts: dict[str, int] = defaultdict(int)
            self.tokens: Counter[str] = Counter()
            self.sums: OrderedDict[str, float] = OrderedDict(loss=0.0)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.counts["train" if self.training else "eval"] += 1
            self.tokens.update(rows=x.shape[0], length=x.shape[1])
            self.sums["loss"] += h.detach().mean().item()
            return self.b(h)

    def empty(model: Any, step: int) -> None:
        if step in (4, 8):
            model.counts.clear()
            model.tokens = Counter()

    over_calls(run, Counting(), empty)


@loop(ranks=True)
def logs_by_name(run: Run) -> None:
    class Logging(Two):
        def __init__(self) -> None:
            super().__init__()
            self.log: dict[str, list[Any]] = defaultdict(list)
            self.plain: dict[str, Any] = {"losses": [], "calls": 0}
            self.rows: list[list[Any]] = [[], []]
            self.lengths: set[int] = set()

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.log["mean"].append(h.detach().mean())
            self.log["length"].append(x.shape[1])
            self.plain["losses"].append(h.mean())
            self.plain["calls"] += 1
            self.rows[0].append(x.shape[0])
            self.rows[1] += ["step", self.plain["calls"]]
            self.lengths.add(x.shape[1])
            return self.b(h)

    over_calls(run, Logging())


@loop(ranks=True)
def containers_in_containers(run: Run) -> None:
    class Nested(Two):
        def __init__(self) -> None:
            super().__init__()
            self.stats = {"train": {"steps": 0}, "eval": {"steps": 0}}
            self.made: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
            self.history = [[0, 0.5], [1]]
            self.pair = {"calls": 0}, [0]

        def forward(self, x: Tensor) -> Tensor:
            mode = "train" if self.training else "eval"
            self.stats[mode]["steps"] += 1
            self.made[mode]["calls"] += 1
            self.history[0][0] += 1
            self.history[0][1] *= 0.9
            self.pair[0]["calls"] += 1
            self.pair[1][0] += x.shape[0]
            return self.b(self.a(x)) * self.stats["train"]["steps"] + self.history[0][1]

    over_calls(run, Nested())


@loop(ranks=True)
def tensors_are_entries(run: Run) -> None:
    """Averages over calls: of a dict, beside numbers, of one that begins empty, and of a list."""

    class Averaging(Two):
        def __init__(self) -> None:
            super().__init__()
            self.stats: dict[str, Any] = {"n": 0, "sum": torch.zeros(()), "average": None}
            self.averages: dict[str, Tensor] = {}
            self.items = [torch.zeros(8), 0]

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            mean = h.detach().mean()
            self.stats["n"] += 1
            self.stats["sum"] = self.stats["sum"] + mean
            before = self.stats["average"]
            self.stats["average"] = mean if before is None else 0.9 * before + 0.1 * mean
            for name in ("one", "other"):
                self.averages[name] = mean if name not in self.averages else 0.5 * (self.averages[name] + mean)
            self.items[0] = 0.9 * self.items[0] + h.detach().mean((0, 1))
            return self.b(h - self.items[0]) - self.stats["sum"] / self.stats["n"] - self.averages["one"]

    over_calls(run, Averaging())


@loop(ranks=True)
def the_last_few(run: Run) -> None:
    class Recent(Two):
        def __init__(self) -> None:
            super().__init__()
            self.recent: deque[Any] = deque(maxlen=3)
            self.full = deque([0.0] * 3, maxlen=3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.recent.append(h.detach().mean())
            self.full.append(self.full[-1] + 1.0)
            return self.b(h) - sum(self.recent) / len(self.recent) * self.full[0]

    over_calls(run, Recent())


class Shared(nn.Module):
    def __init__(self, stats: dict[str, Any]) -> None:
        super().__init__()
        self.linear, self.stats = nn.Linear(8, 8), stats

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        self.stats["n"] += 1
        self.stats["norms"].append(x.detach().norm())
        return x


class Layers(Two):
    """Layers that share a dict, which the model itself does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.stats: dict[str, Any] = {"n": 0, "norms": []}
        self.layers = nn.ModuleList([Shared(self.stats) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.b(self.a(x))


@loop(ranks=True)
def layers_share_a_dict(run: Run) -> None:
    over_calls(run, Layers())


@loop()
def a_layer_gets_its_own_dict(run: Run) -> None:
    """The layers have shared one before."""

    def part(model: Any, step: int) -> None:
        if step == 5:
            model.layers[2].stats = {"n": 100, "norms": []}
        elif step == 8:
            model.layers[3].stats = {**model.stats, "n": 7}

    over_calls(run, Layers(), part)


@loop()
def layers_have_dicts_of_their_own(run: Run) -> None:
    class Separate(Layers):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                layer.stats = {"n": 0, "norms": []}

    over_calls(run, Separate())


class Phase(enum.Enum):
    WARM = 1
    TRAIN = 2


@loop(ranks=True)
def enums_and_dtypes_are_read_and_changed(run: Run) -> None:
    class Phases(Two):
        def __init__(self) -> None:
            super().__init__()
            self.phase, self.seen, self.step = Phase.WARM, torch.float16, 0
            self.stats = {"phase": Phase.WARM}

        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            if self.phase is Phase.WARM and self.step >= 3:
                self.phase = Phase.TRAIN
            if self.stats["phase"] is Phase.WARM and self.step >= 5:
                self.stats["phase"] = Phase.TRAIN
            if self.seen != x.dtype:
                self.seen = x.dtype
            h = self.a(x) * (0.5 if self.phase is Phase.WARM else 1.0)
            return self.b(h) * (0.5 if self.stats["phase"] is Phase.WARM else 1.0)

    over_calls(run, Phases())


class State(NamedTuple):
    step: int = 0
    average: float = 1.0


@loop(ranks=True)
def tuples_and_dicts_are_made_anew(run: Run) -> None:
    class Replacing(Two):
        def __init__(self) -> None:
            super().__init__()
            self.state, self.pair, self.stats = State(), (0, 1.0), {"n": 0, "rest": 1.5}

        def forward(self, x: Tensor) -> Tensor:
            self.state = self.state._replace(step=self.state.step + 1, average=self.state.average * 0.9)
            count, factor = self.pair
            self.pair = count + 1, factor * 0.9
            self.stats = {**self.stats, "n": self.stats["n"] + 1}
            return self.b(self.a(x)) * self.state.average * factor + self.stats["n"]

    over_calls(run, Replacing())


class Meter:
    """As loops keep one for each of several numbers."""

    def __init__(self) -> None:
        self.sum, self.count, self.values, self.by = 0.0, 0, list[float](), defaultdict(int)

    def update(self, value: float, count: int) -> None:
        self.sum += value
        self.count += count
        self.values.append(value)
        self.by["rows"] += count


@loop(ranks=True)
def meters_by_name(run: Run) -> None:
    class Metered(Two):
        def __init__(self) -> None:
            super().__init__()
            self.meters = {"mean": Meter(), "other": Meter()}

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.meters["mean"].update(h.detach().mean().item(), x.shape[0])
            return self.b(h)

    over_calls(run, Metered())


@loop()
def attributes_in_the_order_in_which_they_are_set(run: Run) -> None:
    class Setting(Two):
        def forward(self, x: Tensor) -> Tensor:
            self.zeta = self.a(x).detach().mean()
            self.alpha = x.shape[1]
            self.middle = 1
            return self.b(x)

    over_calls(run, Setting())


@loop()
def a_copy_counts_for_itself(run: Run) -> None:
    model = run.compile(Stats().double())
    optimizer = sgd(model)
    for step in range(2):
        model(numbers(4, 8, seed=step)).square().mean().backward()
        finish(run, model, optimizer)
    twin = copy.deepcopy(model)
    for step in range(3):
        run.note("of the copy", twin(numbers(4, 8, seed=step)))
    run.note("of the model", model(numbers(4, 8, seed=7)))
    run.note("stats", [model.stats, twin.stats])


@loop()
def entries_in_a_window(run: Run) -> None:
    """A call for each microbatch counts once."""
    model = run.compile(Stats().double())
    optimizer = sgd(model)
    for step in range(3):
        for part in range(4):
            (model(numbers(4, 8, seed=4 * step + part)).square().mean() / 4).backward()
        finish(run, model, optimizer)
        run.note_state(model)


@loop(ranks=True)
def ways_set_entries_in_another_order(run: Run) -> None:
    """That of the first call is the one that a trace takes second."""

    class Sorting(Two):
        def __init__(self) -> None:
            super().__init__()
            self.sums: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            if self.a.weight.square().sum() * x.mean() > 0:
                self.sums["a"] = h.detach().mean()
                self.sums["b"] = self.last = h.detach().sum()
            else:
                self.last = h.detach().sum()
                self.sums["b"] = h.detach().sum()
                self.sums["a"] = h.detach().mean()
            return self.b(h)

    model = run.compile(Sorting().double())
    for step in range(3):
        run.note("output", model(numbers(4, 8, seed=step).abs() * (-1) ** (step + 1)))
        run.note("set", [model.sums["a"], model.sums["b"], model.last])


COUNTS = {"calls": 0}


@program(refused="read it there through the model")
class ReadsItAsAGlobal(Two):
    """A copy counts in a dict of its own."""

    def __init__(self) -> None:
        super().__init__()
        COUNTS["calls"] = 0
        self.counts = COUNTS

    def forward(self, x: Tensor) -> Tensor:  # refused
        self.counts["calls"] += 1
        return self.a(x) / (1 + COUNTS["calls"])


@program(refused="read it there through the model")
def reads_it_in_a_closure() -> nn.Module:
    meter = Meter()

    class Metered(Two):
        def __init__(self) -> None:
            super().__init__()
            self.meter = meter
            self.count = lambda: meter.count  # refused

        def forward(self, x: Tensor) -> Tensor:
            self.meter.count += 1
            return self.a(x) * self.count()

    return Metered()


@program(refused="read it there through the model")
class ReadsItByAMethod(Two):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"calls": 0}
        self.read = self.counts.get

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        return self.a(x) * self.read("calls", 0)  # refused


@program(refused="set its attributes instead")
class ReplacesAnObject(Two):
    def __init__(self) -> None:
        super().__init__()
        self.state = Held()

    def forward(self, x: Tensor) -> Tensor:
        self.state = replace(self.state, step=self.state.step + 1)  # refused
        return self.a(x)


@dataclass
class Held:
    step: int = 0


@program(refused="deque")
class TakesTheFirstOut(Two):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(self.a(x).detach().mean())
        if len(self.log) > 3:  # refused
            self.log.pop(0)
        return self.b(x)


@program(refused="deque")
class MakesItsHistoryAnew(Two):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log = [*self.log, self.a(x).detach().mean()][-3:]  # refused
        return self.b(x)


@program()
class AddsUpWithGradients(Two):
    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, Any] = defaultdict(float)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.sums["loss"] = self.sums["loss"] + h.mean()
        return self.b(h)


@loop(refused="replace it each time")
def an_entry_is_replaced_and_changed_in_place(run: Run) -> None:
    class Replacing(Two):
        def __init__(self) -> None:
            super().__init__()
            self.items = [torch.zeros(8), 0]

        def forward(self, x: Tensor) -> Tensor:
            self.items[1] += 1
            if self.items[1] % 2:
                self.items[0] = self.items[0] + 1.0
            else:
                self.items[0].add_(1.0)  # refused
            return self.a(x) - self.items[0]

    model = run.compile(Replacing().double())
    for step in range(3):
        run.changed()
        run.note("output", model(numbers(4, 8, seed=step)))


@loop(refused="make it a registered buffer")
def entries_fix_what_is_computed(run: Run) -> None:
    class Repeating(Two):
        def __init__(self) -> None:
            super().__init__()
            self.stats = {"n": 0}

        def forward(self, x: Tensor) -> Tensor:
            self.stats["n"] += 1
            for _ in range(self.stats["n"]):  # refused
                x = self.a(x).tanh()
            return x

    model = run.compile(Repeating().double())
    for step in range(12):
        run.changed()
        run.note("output", model(numbers(4, 8, seed=step)))
