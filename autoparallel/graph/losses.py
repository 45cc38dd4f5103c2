"""Which output of a graph is the loss, and what it weighs among microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

NAME = "loss"


def is_loss(node: Any) -> bool:
    """Whether an output that can be differentiated may be a loss: a real scalar."""
    value = node.meta["val"]
    return value.ndim == 0 and value.is_floating_point()


@dataclass(frozen=True)
class LossWeight:
    """What a loss weighs among the microbatches of a step.

    Attributes:
        output: the index of the graph's output that holds the weight, where it depends on the data.
        size: the weight as a product of sizes (of the trace), where it does not; 1 for every call of a sum.
        kind: ``"mean"``, ``"sum"``, ``"unknown"`` where the weight cannot be told, ``"none"`` where there is no loss.
        reason: why nobody knows it.
        from_call: whether the weight comes with the call, the same for all parts of its batch, whose losses add up.
        least: what the program divides by where the weight is 0, so that a microbatch of no weight adds its sum to
            those of the others; 0 where it has none to add.
        added: a number that the program adds to the weight before it divides by it.
        by_zero: whether the plain model divides by 0 there.
        mixes: which call is the first of which it is only taken for granted that it leaves the rows of the batch
            apart; empty where there is none.
        hooked: where a hook inside of the model is given the gradient of each microbatch; empty where none is.
        returned: whether the loss function returned it beside the sum, so that it is each microbatch's own.
        others: the weights of its other terms, where those are means over other numbers: the losses of microbatches are
            put together by the first as long as these are the same multiples of it in all of them. ``reason`` says
            where they are.
    """

    kind: str
    output: int | None = None
    size: Any = 1
    reason: str = ""
    from_call: bool = False
    least: float = 0.0
    added: float = 0.0
    by_zero: bool = False
    mixes: str = ""
    hooked: str = ""
    returned: bool = False
    others: tuple[LossWeight, ...] = ()

    @property
    def each(self) -> tuple[LossWeight, ...]:
        """What each of its terms weighs."""
        return self, *self.others

    @property
    def outputs(self) -> tuple[int, ...]:
        """The indices of the graph's outputs that hold weights."""
        return tuple({weight.output: None for weight in self.each if weight.output is not None})

    def divisor(self, weight: Any) -> Any:
        """What the program divides the loss by, where it weighs ``weight``."""
        return (torch.where(weight == 0, self.least, weight) if self.least else weight) + self.added

    @property
    def problem(self) -> str:
        """Why the losses of parts of a batch cannot be put together to that of the batch; empty where they can."""
        return f"it cannot be told what the loss is a mean over: {self.reason}" if self.kind == "unknown" else ""

    @property
    def apart(self) -> str:
        """Why those of parts of equal size may be put together for some batches only; empty where they can for all."""
        return self.reason if self.kind == "mean" and self.others and self.outputs else ""


NO_LOSS = LossWeight("none", reason="it is computed outside of the compiled model")


def have_one_ratio(counts: torch.Tensor) -> bool:
    """Whether the numbers that the means of a loss are over, [microbatches, means], have the same ratio in all
    microbatches, and are none of them zero.  It waits for the device."""
    total = counts.sum(0)
    products = counts * total[:1], counts[:, :1] * total
    return bool((counts > 0).all()) and torch.allclose(*products, rtol=1e-12, atol=0)


def explain_apart(reason: str, shown: str = "") -> str:
    """Why microbatches of these numbers cannot be put together, and what to change.

    Args:
        reason: as ``LossWeight.apart``.
        shown: the numbers of some of them.
    """
    return (
        f"the losses of microbatches cannot be put together: {reason}, whose ratio differs between "
        f"microbatches{shown}; the gradients of each mean would have to be divided apart\n"
        "What to change: let the model divide each sum by its count over all microbatches, which the loop gives it as "
        "an input: such losses add up."
    )


def explain_ambiguity(count: int) -> str:
    """Why nobody knows which output is the loss."""
    return f"the model returns {count} scalars that can be differentiated, and none of them is called {NAME!r}"
