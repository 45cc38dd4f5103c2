"""Objects that hold tensors, which a forward is given, changes and returns."""

from __future__ import annotations

import weakref
from collections import UserDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, sgd


class Masked:
    """As the images of a detector: tensors under names, one of them behind a property."""

    def __init__(self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0) -> None:
        self._x, self.mask, self.scale, self.kind = x, mask, scale, torch.float64

    @property
    def x(self) -> Tensor:
        return self._x

    @x.setter
    def x(self, x: Tensor) -> None:
        self._x = x

    def __iter__(self) -> Any:
        return iter((self._x, self.mask))


class Store:
    """As the storage of a graph of torch_geometric, which knows whose it is."""

    def __init__(self, parent: Graph) -> None:
        self.mapping: dict[str, Tensor] = {}
        self.parent = weakref.ref(parent)


class Graph:
    def __init__(self, **tensors: Tensor) -> None:
        self.__dict__["store"] = Store(self)
        self.store.mapping.update(tensors)

    def __getattr__(self, name: str) -> Any:
        if name == "store" or name not in self.store.mapping:
            raise AttributeError(name)
        return self.store.mapping[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.store.mapping[name] = value


class Attributes(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


@dataclass
class Fields:
    x: Tensor
    scale: float = 2.0


@dataclass(slots=True)
class Slots:
    x: Tensor


class Encoding(UserDict[str, Any]):
    pass


class Sets(Two):
    """Changes what it is given, and returns it."""

    def forward(self, batch: Any) -> Any:
        batch.h = self.a(batch.x)
        batch.x = self.b(batch.h)
        return batch


def _train(run: Run, model: Any, batch: Any, names: str) -> None:
    optimizer = sgd(model)
    output = model(batch)
    for name in names.split():
        run.note(name, getattr(batch, name), grad=isinstance(getattr(batch, name), Tensor))
        run.note(f"returned {name}", getattr(output, name))
    output.x.square().mean().backward()
    run.note_gradients(model)
    optimizer.step()
    optimizer.zero_grad()


@loop(ranks=True)
def an_object_is_changed_and_returned(run: Run) -> None:
    model = run.compile(Sets().double())
    for step in range(STEPS):
        x = numbers(8, 8, seed=step)
        _train(run, model, [Masked(x), Fields(x), SimpleNamespace(x=x, n=step), Attributes(x=x)][step % 4], "x h")


@loop(ranks=True)
def a_graph_is_changed_and_returned(run: Run) -> None:
    model = run.compile(Sets().double())
    for step in range(STEPS):
        graph = Graph(x=numbers(8, 8, seed=step))
        _train(run, model, graph, "x h")
        run.note("parent", graph.store.parent() is graph)


class AsksItsParent(Two):
    def forward(self, graph: Graph) -> Tensor:
        owner = graph.store.parent()
        assert owner is graph
        return self.b(self.a(owner.x))


@loop(ranks=True)
def a_graph_asks_its_parent(run: Run) -> None:
    model = run.compile(AsksItsParent().double())
    for step in range(STEPS):
        run.note("output", model(Graph(x=numbers(8, 8, seed=step))), grad=True)


class SetsTheFirst(Two):
    def forward(self, batches: list[Any]) -> Tensor:
        batches[0].h = self.a(batches[0].x)
        return self.b(batches[-1].h if hasattr(batches[-1], "h") else batches[-1].x)


def twice(step: int) -> tuple[Any, ...]:
    batch = SimpleNamespace(x=numbers(8, 8, seed=step))
    return ([batch, batch],)


@program(batch=twice, refused="give a copy", line=False)
def one_object_twice() -> nn.Module:
    return SetsTheFirst()


class Unpacks(Two):
    def forward(self, images: list[Masked], more: dict[str, Masked]) -> Masked:
        (x, mask), (y, _) = images[0], more["other"]
        h = self.a(x) * images[0].scale + y.to(images[0].kind)
        images.append(Masked(h))
        return Masked(self.b(h.masked_fill(mask[:, None], 0.0)), mask)


@loop(ranks=True)
def objects_in_containers(run: Run) -> None:
    model = run.compile(Unpacks().double())
    for step in range(STEPS):
        x = numbers(8, 8, seed=step)
        images = [Masked(x, x[:, 0] > 0, scale=1.0 + step)]
        output = model(images, {"other": Masked(x + 1)})
        run.note("output", output.x, grad=True)
        run.note("mask", (output.mask, output.scale))
        run.note("appended", images[1].x, grad=True)


@loop(ranks=True)
def entries_of_a_user_dict_are_set(run: Run) -> None:
    class SetsEntries(Two):
        def forward(self, batch: Any) -> Tensor:
            batch["h"] = self.a(batch["x"])
            return self.b(batch["h"])

    model = run.compile(SetsEntries().double())
    for step in range(STEPS):
        batch = Encoding(x=numbers(8, 8, seed=step), name="a")
        run.note("output", model(batch), grad=True)
        run.note("h", batch["h"], grad=True)


class Policy(Two):
    def forward(self, x: Tensor) -> tuple[Any, Any]:
        h = self.a(x)
        return torch.distributions.Normal(self.b(h), 0.5), torch.distributions.Categorical(logits=h)


@loop(ranks=True)
def distributions_are_returned(run: Run) -> None:
    model = run.compile(Policy().double())
    optimizer = sgd(model)
    for step in range(STEPS):
        normal, categorical = model(numbers(8, 8, seed=step))
        loss = -normal.log_prob(numbers(8, 8, seed=9)).mean() - categorical.log_prob(torch.arange(8)).mean()
        run.note("loss", loss)
        (loss - categorical.entropy().mean()).backward()
        run.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@program(batch=lambda step: (Slots(numbers(8, 8, seed=step)),), refused=r"dataclasses\.replace", line=False)
class SetsSlots(Two):
    def forward(self, batch: Slots) -> Tensor:
        batch.x = self.a(batch.x)
        return self.b(batch.x)


class Applies(Masked):
    def __init__(self, x: Tensor) -> None:
        super().__init__(x)
        self.apply = lambda h: h.tanh()


@program(batch=lambda step: (Applies(numbers(8, 8, seed=step)),), refused=r"pass the tensors that", line=False)
class AnObjectWithAFunction(Two):
    def forward(self, images: Applies) -> Tensor:
        return self.b(images.apply(self.a(images.x)))


class ReturnsAFunction(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return Applies(super().forward(x))


@program(refused=r"objects that hold tensors and constants alone", line=False, loss=lambda out: out.x.square().mean())
def an_object_with_a_function_is_returned() -> nn.Module:
    return ReturnsAFunction(8, 8)


class Slotted:
    """A class without ``__dict__`` that is no dataclass, with a name that Python mangles and a slot that is empty."""

    __slots__ = ("__double", "later", "tags", "x")

    def __init__(self, x: Tensor) -> None:
        self.x, self.__double = x, x * 2
        self.tags: list[Tensor] = []

    @property
    def double(self) -> Tensor:
        return self.__double


class Both(Slotted):
    """Has slots and a ``__dict__``."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x)
        self.h: Tensor | None = None


@dataclass(slots=True)
class Scaled:
    """What is made of it by its ``__init__`` would be scaled twice."""

    x: Tensor
    scale: float = 3.0
    tags: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.x = self.x * self.scale


@loop(ranks=True)
def objects_with_slots(run: Run) -> None:
    class Appends(Two):
        def forward(self, batch: Any) -> Any:
            batch.tags.append(self.a(batch.x))
            if isinstance(batch, Both):
                batch.h = batch.tags[0] + batch.double
            return type(batch)(self.b(batch.tags[0]))

    model = run.compile(Appends().double())
    for step in range(STEPS):
        batch = [Slotted, Both, Scaled][step](numbers(8, 8, seed=step))
        output = model(batch)
        run.note("tags", batch.tags, grad=True)
        run.note("output", (output.x, output.double if isinstance(output, Slotted) else output.scale))
        run.note("h", batch.h if isinstance(batch, Both) else None, grad=True)
        output.x.square().mean().backward()
        run.note_gradients(model)


@program(batch=lambda step: (Both(numbers(8, 8, seed=step)),), refused=r"copy\.copy", line=False)
class SetsASlotBesideADict(Two):
    def forward(self, batch: Both) -> Tensor:
        batch.x = self.a(batch.x)
        return self.b(batch.x)


class Tokens(UserDict[str, Any]):
    """As the ``BatchEncoding`` of transformers: attributes beside the entries, one of which no call may be given."""

    def __init__(self, entries: dict[str, Any] | None = None, scale: float | None = None) -> None:
        super().__init__(entries)
        self.scale, self.source = scale, object()


@loop(ranks=True)
def attributes_of_a_user_dict(run: Run) -> None:
    class Scales(Two):
        def forward(self, batch: Tokens) -> Tokens:
            batch["h"] = self.a(batch["x"])
            return Tokens({"y": self.b(batch["h"]) * (1.0 if batch.scale is None else batch.scale)}, scale=batch.scale)

    model = run.compile(Scales().double())
    for step in range(STEPS):
        batch = Tokens({"x": numbers(8, 8, seed=step)}, scale=[None, 2.0, 3.0][step])
        output = model(batch)
        run.note("output", (output["y"], output.scale, batch["h"]), grad=True)


@loop(ranks=True)
def an_attribute_of_a_dict_is_set(run: Run) -> None:
    class Entries(dict[str, Any]):
        pass

    class Flags(Two):
        def forward(self, batch: Any) -> Tensor:
            batch.done = True
            return self.b(self.a(batch["x"]))

    model = run.compile(Flags().double())
    for step in range(STEPS):
        batch = Entries(x=numbers(8, 8, seed=step))
        run.note("output", model(batch), grad=True)
        run.note("done", batch.done)


def ring(step: int) -> tuple[Any, ...]:
    first, second = SimpleNamespace(x=numbers(8, 8, seed=step)), SimpleNamespace()
    first.other, second.other = second, first
    return (first,)


@loop(refused=r"weak one", line=False)
def an_object_that_holds_itself(run: Run) -> None:
    class Reads(Two):
        def forward(self, batch: Any) -> Tensor:
            return self.b(self.a(batch.x))

    model = run.compile(Reads().double())
    model(SimpleNamespace(x=numbers(8, 8, seed=0)))
    model(*ring(1))
