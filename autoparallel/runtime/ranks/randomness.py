"""Where in the stream of random numbers the process stands.

[Note: one stream, beside torch's] A call that draws takes one position of a stream: its numbers are a function of the
stream's seed and of that position (see ``operators.random``).  As with torch's own generator there is one stream in a
process, which all models share, and it follows ``torch.manual_seed``.  So that this is seen, a call that draws moves
torch's default generator on by one draw, and what the stream's place was at which state of the generator is written
down: a state that comes back (``torch.set_rng_state``, the end of ``torch.random.fork_rng``) brings back the place, the
state of a generator that was just seeded begins a stream, and any other state, to which somebody else's draws have led,
goes on where the last call with that seed ended; if a model was compiled at such a state, there is no such call: a
script that seeds, builds and compiles draws the same however often it runs in one process.

All ranks of a call use the first rank's place, which comes with what the ranks tell each other anyway.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from autoparallel.operators import RandomState

_REMEMBERED = 4096  # states of torch's generator
_MASK64 = (1 << 64) - 1

Place = tuple[int, int]
"""A seed and a position: how many calls have drawn since it was set."""


@dataclass
class Stream:
    """The stream of a process (see [Note: one stream, beside torch's]).

    Attributes:
        places: the place at each state of torch's generator, by its seed and a digest of it; the oldest first.
        last: the place after the last call, for each seed of torch's generator.
    """

    places: dict[tuple[int, bytes], Place] = field(default_factory=dict)
    last: dict[int, Place] = field(default_factory=dict)

    def place(self) -> Place:
        """The place of the next call that draws."""
        seed = torch.initial_seed()
        state = _state()
        place = self.places.get((seed, state))
        if place is not None:
            return place
        if state == _fresh(seed):
            return seed, 0
        return self.last.get(seed, (seed, 0))

    def begin(self) -> None:
        """A model is compiled: a state of the generator that no call has led to begins the seed's stream."""
        seed = torch.initial_seed()
        self.last[seed] = self.places.get((seed, _state()), (seed, 0))

    def move(self, place: Place) -> None:
        """Goes on from another place, whatever torch's generator was seeded with before; a seed that is set afterwards,
        the same one or another, begins its stream, because the generator moves on here."""
        self.places.clear()
        self.last.clear()
        torch.rand((), generator=torch.default_generator)
        self._note(place)

    def draw(self, place: Place) -> RandomState:
        """What a call at a place draws, which is over then."""
        seed = torch.initial_seed()
        if _state() == _fresh(seed):  # what came after the last time it was seeded so means nothing any more
            self.places = {key: at for key, at in self.places.items() if key[0] != seed}
        else:
            self._note(place)
        torch.rand((), generator=torch.default_generator)
        self._note((place[0], place[1] + 1))
        return RandomState(*place)

    def _note(self, place: Place) -> None:
        seed = torch.initial_seed()
        self.places[seed, _state()] = self.last[seed] = place
        while len(self.places) > _REMEMBERED:
            del self.places[next(iter(self.places))]


STREAM = Stream()
"""The stream of this process."""


def _state() -> bytes:
    """A digest of the state of torch's default generator."""
    return _digest(torch.get_rng_state())


@lru_cache(_REMEMBERED)
def _fresh(seed: int) -> bytes:
    """The state of a generator that was just seeded."""
    return _digest(torch.Generator().manual_seed(seed).get_state())


def _digest(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


def pack(place: Place) -> bytes:
    """A place as 16 bytes."""
    return struct.pack("<QQ", place[0] & _MASK64, place[1])


def unpack(packed: torch.Tensor) -> Place:
    """The inverse of :func:`pack`, of a row of bytes."""
    seed, position = struct.unpack("<QQ", packed.numpy().tobytes())
    return seed, position


def to_tensor(place: Place) -> torch.Tensor:
    """A place as it stands in a state dict."""
    return torch.frombuffer(bytearray(pack(place)), dtype=torch.int64).clone()


def from_tensor(saved: torch.Tensor) -> Place:
    """The inverse of :func:`to_tensor`."""
    return unpack(saved.detach().cpu().contiguous().view(torch.uint8))


def may_draw(model: torch.nn.Module) -> bool:
    """Whether a submodule is one of torch's that drop elements, or draw otherwise, while they train."""
    return any(_draws(module) for module in model.modules())


def _draws(module: torch.nn.Module) -> bool:
    nn = torch.nn
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    return isinstance(module, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)
