"""What cannot be copied and is in models all the same: locks, open files, threads, queues, modules of Python."""

from __future__ import annotations

import io
import logging
import queue
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.programs.loops import finish
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, sgd

_LOCK, _QUEUE, _TEXT = threading.Lock(), queue.Queue[int](), io.StringIO()


class Holds(nn.Module):
    def __init__(self, part: Any = None) -> None:
        super().__init__()
        self.layer, self.part, self.calls = nn.Linear(8, 8), part, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


def _train(run: Run, model: Any) -> None:
    compiled = run.compile(model.double())
    optimizer = sgd(compiled)
    for step in range(STEPS):
        output = compiled(numbers(4, 8, seed=step))
        run.note("output", output)
        output.square().mean().backward()
        finish(run, compiled, optimizer)
    run.note("calls", compiled.calls)


@loop(ranks=True)
def thread_pool_that_is_not_used(run: Run) -> None:
    with ThreadPoolExecutor(1) as pool:
        _train(run, Holds(pool))


@loop()
def file_that_is_not_used(run: Run) -> None:
    with tempfile.TemporaryFile("w") as file:
        _train(run, Holds(file))


@loop()
def log_handler_that_is_not_used(run: Run) -> None:
    _train(run, Holds(logging.StreamHandler()))


class Tracker:
    """Of a user's class: it is copied but for its parts that cannot be."""

    def __init__(self) -> None:
        self.lock, self.rows, self.queue = threading.RLock(), 0, queue.Queue[int]()


class Tracks(Holds):
    def forward(self, x: Tensor) -> Tensor:
        with self.part.lock:
            self.part.rows += 1
        return super().forward(x) * self.part.rows


@loop(ranks=True)
def lock_of_an_object(run: Run) -> None:
    tracker = Tracker()
    _train(run, Tracks(tracker))
    run.note("rows", tracker.rows)


class Guarded(Holds):
    def forward(self, x: Tensor) -> Tensor:
        with self.part, _LOCK:
            return super().forward(x)


@loop()
def lock_around_forward(run: Run) -> None:
    _train(run, Guarded(threading.Lock()))


@loop()
def condition_and_event(run: Run) -> None:
    """A condition has no state but its lock; whether an event is set is a state."""

    class Tells(Holds):
        def forward(self, x: Tensor) -> Tensor:
            with self.part:
                self.part.notify_all()
            self.ready.set()
            return super().forward(x)

    model = Tells(threading.Condition())
    model.ready = threading.Event()  # type: ignore[assignment]
    _train(run, model)
    run.note("ready", model.ready.is_set())


@loop()
def semaphore_around_forward(run: Run) -> None:
    _train(run, Guarded(threading.BoundedSemaphore(2)))


class Functional(Holds):
    def forward(self, x: Tensor) -> Tensor:
        return self.part.gelu(super().forward(x))


@loop(ranks=True)
def module_of_torch_as_an_attribute(run: Run) -> None:
    _train(run, Functional(torch.nn.functional))


@loop(ranks=True)
def module_of_settings_as_an_attribute(run: Run) -> None:
    """The loop changes what it has, and a class in it."""
    settings = ModuleType("settings")
    vars(settings).update(scale=1.0, Inner=type("Inner", (), {"slope": 0.1, "__module__": __name__}))

    class Reads(Holds):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.leaky_relu(super().forward(x), self.part.Inner.slope) * self.part.scale

    compiled = run.compile(Reads(settings).double())
    for step in range(STEPS):
        settings.scale, settings.Inner.slope = 1.0 + step // 2, 0.1 * step
        run.note("output", compiled(numbers(4, 8, seed=step)))


@loop()
def view_of_a_dict(run: Run) -> None:
    """It is compared by what it has, which the loop changes."""
    settings: dict[str, Any] = {"scale": 1.0, "inner": {"slope": 0.1}}

    class Reads(Holds):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.leaky_relu(super().forward(x), self.part["inner"]["slope"]) * self.part["scale"]

    compiled = run.compile(Reads(MappingProxyType(settings)).double())
    for step in range(STEPS):
        settings["scale"], settings["inner"]["slope"] = 1.0 + step // 2, 0.1 * step
        run.note("output", compiled(numbers(4, 8, seed=step)))


@program(refused="use it outside of the model")
class PutsIntoAQueue(Holds):
    def __init__(self) -> None:
        super().__init__(queue.Queue())

    def forward(self, x: Tensor) -> Tensor:
        self.part.put(1)  # refused
        return super().forward(x)


@program(refused="use it outside of the model")
class PutsIntoAQueueOfAnObject(Holds):
    def __init__(self) -> None:
        super().__init__(Tracker())

    def forward(self, x: Tensor) -> Tensor:
        self.part.queue.put(1)  # refused
        return super().forward(x)


@program(refused="use it outside of the model")
class PutsIntoAQueueAroundIt(Holds):
    def forward(self, x: Tensor) -> Tensor:  # refused
        _QUEUE.put(1)
        return super().forward(x)


@program(refused="use it outside of the model")
class WritesATextAroundIt(Holds):
    def forward(self, x: Tensor) -> Tensor:  # refused
        print(x.shape, file=_TEXT)
        return super().forward(x)


@program(refused="start it outside of the model")
class SubmitsToThreads(Holds):
    def __init__(self) -> None:
        super().__init__(ThreadPoolExecutor(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.part.submit(super().forward, x).result()  # refused


@program(refused="start it outside of the model")
class StartsAThread(Holds):
    def __init__(self) -> None:
        super().__init__([])

    def forward(self, x: Tensor) -> Tensor:
        thread = threading.Thread(target=self.part.append, args=(1,))
        thread.start()  # refused
        thread.join()
        return super().forward(x)


@program(refused="start it outside of the model")
class RunsInAPoolOfItsOwn(Holds):
    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(self.layer, x.chunk(2)), torch.zeros(()))  # refused


@program(refused="take the value outside of the model")
class ReadsAGenerator(Holds):
    def __init__(self) -> None:
        super().__init__(float(i) for i in range(100))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.part)  # refused


class HasThemInLists(Holds):
    """Locks may be used; of files it is said where the list is read."""

    def forward(self, x: Tensor) -> Tensor:
        for lock in self.part["locks"]:
            with lock:
                self.calls += 1
        return super().forward(x)


@loop()
def locks_in_a_dict(run: Run) -> None:
    model = HasThemInLists({"locks": [threading.Lock(), threading.Lock()]})
    model.files = [sys.stderr]  # type: ignore[assignment]
    _train(run, model)


@program(refused="use it outside of the model")
class WritesFilesOfAList(Holds):
    def __init__(self) -> None:
        super().__init__([sys.stderr])

    def forward(self, x: Tensor) -> Tensor:
        for file in self.part:  # refused
            file.write("\n")
        return super().forward(x)


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("there is one alone")


@program(refused=r"copy.deepcopy\(model\) works", line=False)
class HasWhatRefusesToBeCopied(Holds):
    def __init__(self) -> None:
        super().__init__(Uncopyable())
