"""Errors that a model catches: what only a trace raises, and texts of errors that decide about what is computed."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.capture.programs.inplace import Two
from tests.capture.programs.texts import FACTORS, Talker, counted
from tests.capture.registry import program
from tests.capture.runner import signed

LOGGER = logging.getLogger(__name__)


@program(batch=signed, refused="keep it a tensor")
class ReadsAValueOrGoesOn(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        try:
            index = h.sum(0).argmax().__index__()  # refused
        except Exception:
            index = 0
        return self.b(h) * (index + 1)


@program(batch=signed, refused="keep it a tensor")
class IndexesByAValueOrGoesOn(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        index = h.sum(0).argmax().item()
        try:
            scale = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0][index]  # refused
        except Exception:
            scale = 9.0
        return self.b(h) * scale


@program(ranks=True)
class ViewsOrReshapes(Two):
    """The error of a view is eager's, and leaves nothing in the program."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).unflatten(1, (2, 4)).transpose(1, 2)
        try:
            h = h.view(-1, 8)
        except RuntimeError:
            h = 2 * h.reshape(-1, 8)
        return self.b(h)


@program(ranks=True)
class CallsLayersWithAndWithoutLengths(Two):
    """Layers that take no lengths raise, and are called again without."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            try:
                x = layer(x, lengths=3)
            except TypeError:
                x = layer(x).tanh()
        return x


@program(batch=signed, refused="numpy|in the loop")
class ReadsAnArrayOrGoesOn(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        try:
            scale = float(h.detach().numpy().max())  # refused
        except Exception:
            scale = 1.0
        return self.b(h) * scale


@program(batch=signed, refused="compute a new tensor")
class WritesBehindAutogradOrGoesOn(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).exp()
        with contextlib.suppress(RuntimeError):
            h.data.mul_(2.0)  # refused
        return self.b(h)


@program(batch=signed)
class RaisesItsOwnInstead(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        try:
            scale = h.max().item()
        except Exception:
            raise ValueError("there is no maximum") from None
        return self.b(h) * scale


@program(batch=counted)
class LooksUpTheError(Talker):
    """Raised here, or two calls away; by a check, as a warning, or kept for later."""

    def factor(self, h: Tensor, n: Tensor) -> float:
        kept: Any = None
        try:
            raise ValueError(f"{n}")
        except ValueError as error:
            kept, found = error, FACTORS.get(str(error), 7.0)
        try:
            self.fail(n)
        except LookupError as error:
            found += FACTORS.get(error.args[0], 11.0)
        try:
            torch._check(h.shape[1] > 100, lambda: f"{n}")
        except RuntimeError as error:
            found += FACTORS.get(str(error), 13.0)
        try:
            raise ValueError(f"{n}")
        except ValueError:
            found += FACTORS.get(str(sys.exc_info()[1]), 17.0)
        return found + FACTORS.get(str(kept), 19.0)

    def fail(self, n: Tensor) -> None:
        self.fail_with(f"{n}")

    def fail_with(self, message: str) -> None:
        raise KeyError(message)


class Kept:
    """A context that takes errors."""

    text = ""

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, kind: Any, error: Any, _: Any) -> bool:
        self.text = str(error)
        return True


@contextlib.contextmanager
def kept(texts: list[str]) -> Iterator[None]:
    """The same."""
    try:
        yield
    except ValueError as error:
        texts.append(str(error))


@program(batch=counted)
class LooksUpWhatAContextTakes(Talker):
    def factor(self, h: Tensor, n: Tensor) -> float:
        texts: list[str] = []
        with Kept() as first:
            raise ValueError(f"{n}")
        with kept(texts):
            raise ValueError(f"{n}")
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            print(f"{n}", end="")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            warnings.warn(f"{n}", stacklevel=1)
        file = io.StringIO()
        print(f"{n}", end="", file=file)
        texts += [first.text, shown.getvalue(), str(warned[0].message), file.getvalue()]
        return sum(FACTORS.get(text, 7.0 + i) for i, text in enumerate(texts))


@contextlib.contextmanager
def timed() -> Iterator[None]:
    try:
        yield
    finally:
        pass


@program(batch=counted, ranks=True)
class TellsWhatItCatches(Talker):
    """Texts of results that only people read, which are not refused."""

    def factor(self, h: Tensor, n: Tensor) -> float:
        try:
            raise ValueError(f"{h.max()} of {n}")
        except ValueError:
            factor = 2.0
        try:
            raise ValueError(f"{h.max()} of {n}")
        except ValueError as error:
            LOGGER.debug("too large: %s", error)
            logging.getLogger("tests").debug(f"{error} {h.max()}")
        with contextlib.suppress(ValueError):
            raise ValueError(f"{h.max()} of {n}")
        with timed():
            self.check(h.shape[0] > 0, f"no rows of {h.max()}")
        with self.lock():
            print(h.max())
        return factor

    def lock(self) -> Any:
        return threading.Lock()


def look_up(text: str, print: Any = FACTORS.get) -> Any:
    return print(text, 7.0)


def look_up_at_once(text: str) -> Any:
    debug = FACTORS.get
    return debug(text, 7.0)


debug = LOGGER.debug


@program(batch=counted)
class CallsLookingUpByAnotherName(Talker):
    """A name that is a logger's, or Python's, outside of the function that is called."""

    def factor(self, h: Tensor, n: Tensor) -> float:
        def find(text: str) -> Any:
            debug = FACTORS.get
            return debug(text, 7.0)

        return look_up(f"{n}") + look_up_at_once(f"{n}") + find(f"{n}")


type = 3.0  # as a script calls what it is asked for


@program()
class ReadsAGlobalOfThatName(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * type


class Stack:
    """A context, as those of pyro, that leaves it to its base whether it takes errors; that does not."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            return


class Plate(Stack):
    def __exit__(self, *args: Any) -> None:
        return super().__exit__(*args)


class LosesThem(Kept):
    def __exit__(self, *args: Any) -> bool:
        return super().__exit__(*args)


@program(batch=signed, ranks=True)
class ChecksThatAreSaidMoreOf(Two):
    """Checks of values are left out where all that is caught is raised again."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            with Plate():
                h = self.a(x)
                if not h.isfinite().all():
                    raise ValueError("not finite")
        except ValueError as error:
            if x.ndim == 3:
                raise TypeError("in three dims") from error
            raise ValueError(f"{error} in the first layer") from error
        return self.b(h)


@program(batch=signed)
class ChecksThatAContextTakes(Two):
    """Both ways are taken where a context loses the error."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with LosesThem():
            if h.sum() > 0:
                raise ValueError("positive")
            h = h * 2
        return self.b(h)
