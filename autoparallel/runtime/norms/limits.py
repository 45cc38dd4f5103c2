"""Which gradients count in which norm: groups by name, and limits by name or by an optimizer's groups."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from autoparallel.runtime.norms.norm import require_norm_type

Groups = Mapping[str, str | Sequence[str]] | Literal["module", "parameter"]
"""Name of a norm to the patterns of the parameters in it; or one norm for each submodule or parameter."""

Limit = float | Mapping[str, float] | torch.optim.Optimizer
"""One limit; or limits by pattern of parameter names; or the ``"max_norm"`` of an optimizer's groups."""

Norms = torch.Tensor | dict[str, torch.Tensor] | list[torch.Tensor]
"""The norms that belong to limits: one, by pattern, or of each of the optimizer's groups."""

Nonfinite = Literal["propagate", "skip", "raise"]
NONFINITE = get_args(Nonfinite)


@dataclass(frozen=True)
class ClipGradNorm:
    """How every step of an optimizer clips; for ``compile(clip_grad_norm=...)``.

    Attributes:
        max_norm: the limit of the global norm, or limits by pattern of parameter names.
        norm_type: p of the p-norm; positive, or ``inf``.
        nonfinite: what to do when a norm is nan or inf, as in ``ParallelModule.clip_grad_norm_``.

    Raises:
        TypeError: for an optimizer.
        ValueError: for a limit that is negative or nan, a p that is not positive, an unknown ``nonfinite``.
    """

    max_norm: float | Mapping[str, float]
    norm_type: float = 2.0
    nonfinite: Nonfinite = "propagate"

    def __post_init__(self) -> None:
        if isinstance(self.max_norm, torch.optim.Optimizer):
            raise TypeError(
                "clip_grad_norm must be a number or limits by pattern: for those of an optimizer's groups call "
                "model.clip_grad_norm_(optimizer)"
            )
        for limit in self.max_norm.values() if isinstance(self.max_norm, Mapping) else [self.max_norm]:
            require_limit(limit)
        require_norm_type(self.norm_type)
        require_nonfinite(self.nonfinite)


@dataclass(frozen=True)
class Limits:
    """Norms and the limits that they are held to.

    Attributes:
        keys: what the caller calls the norms; None: there is one norm, of everything.
        names: the parameters of each norm; no parameter is in two of them.
        values: the limit of each; inf leaves the gradients as they are.
    """

    keys: tuple[Any, ...] | None
    names: tuple[frozenset[str], ...]
    values: tuple[float, ...]

    def result(self, norms: torch.Tensor) -> Norms:
        """The norms [norms] in the form of the caller's question: a scalar, a dict by pattern, or a list by group."""
        if self.keys is None:
            return norms[0]
        if self.keys and isinstance(self.keys[0], int):
            return list(norms.unbind(0))
        return dict(zip(self.keys, norms.unbind(0), strict=True))


class ParameterNames:
    """A model's parameters by name, a tied one by all of its names.

    Args:
        model: the model.
        parameters: the parameters by the name under which their gradients are kept.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._every = frozenset(parameters)
        names_by_id = {id(p): name for name, p in parameters.items()}
        self._names: dict[str, list[str]] = {name: [] for name in parameters}
        for alias, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in names_by_id:
                self._names[names_by_id[id(parameter)]].append(alias)

    def matching(self, patterns: str | Iterable[str]) -> list[str]:
        """The parameters of which any name matches any of the patterns, such as ``"encoder.*"``.

        Raises:
            ValueError: for a pattern that no parameter matches.
        """
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        matched: dict[str, None] = {}
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise TypeError(f"a pattern of parameter names must be text, not {pattern!r}")
            some = [n for n, names in self._names.items() if any(fnmatch.fnmatchcase(a, pattern) for a in names)]
            if not some:
                example = next(iter(self._parameters), "")
                raise ValueError(f"no parameter matches {pattern!r}; names are such as {example!r}")
            matched.update(dict.fromkeys(some))
        return list(matched)

    def groups(self, groups: Groups) -> dict[str, frozenset[str]]:
        """The parameters of each group; a parameter may be in several.

        Raises:
            TypeError, ValueError: for something else than groups, and for patterns that match nothing.
        """
        if isinstance(groups, str):
            if groups not in ("module", "parameter"):
                raise ValueError(f"groups must be 'module', 'parameter' or a mapping, got {groups!r}")
            sorted_: dict[str, set[str]] = {}
            for name, aliases in self._names.items():
                for alias in aliases if groups == "module" else [name]:
                    sorted_.setdefault(alias.split(".")[0] if groups == "module" else alias, set()).add(name)
            return {key: frozenset(names) for key, names in sorted_.items()}
        if not isinstance(groups, Mapping):
            raise TypeError(f"groups must be 'module', 'parameter' or a mapping, not a {type(groups).__name__}")
        return {str(key): frozenset(self.matching(patterns)) for key, patterns in groups.items()}

    def limits(self, max_norm: Limit) -> Limits:
        """The limits that a caller means.

        Raises:
            ValueError: for a negative limit or nan, a pattern that matches nothing, an optimizer without limits or
                with parameters of another model.
        """
        if isinstance(max_norm, torch.optim.Optimizer):
            return self._of_optimizer(max_norm)
        if not isinstance(max_norm, Mapping):
            return Limits(None, (self._every,), (require_limit(max_norm),))
        if not max_norm:
            raise ValueError("max_norm is an empty mapping: give at least one pattern and its limit")
        values = tuple(require_limit(v) for v in max_norm.values())
        free = set(self._parameters)
        names: list[frozenset[str]] = []
        for pattern in max_norm:  # the first that matches counts
            names.append(frozenset(free.intersection(self.matching(pattern))))
            free -= names[-1]
        return Limits(tuple(max_norm), tuple(names), values)

    def _of_optimizer(self, optimizer: torch.optim.Optimizer) -> Limits:
        names_by_id = {id(p): name for name, p in self._parameters.items()}
        names: list[frozenset[str]] = []
        values: list[float] = []
        for i, group in enumerate(optimizer.param_groups):
            if any(id(p) not in names_by_id for p in group["params"]):
                raise ValueError(
                    f"param_groups[{i}] holds a parameter that is not the compiled model's: make the optimizer after "
                    "compile(), and clip other models on their own"
                )
            names.append(frozenset(names_by_id[id(p)] for p in group["params"]))
            limit = group.get("max_norm")
            values.append(math.inf if limit is None else require_limit(limit))
        if all(group.get("max_norm") is None for group in optimizer.param_groups):
            raise ValueError('no group of the optimizer has a limit: set group["max_norm"] in optimizer.param_groups')
        return Limits(tuple(range(len(names))), tuple(names), tuple(values))


def require_limit(value: Any) -> float:
    """A limit as a float. Raises TypeError for what is no number, ValueError when it is negative or nan."""
    if isinstance(value, bool | str):
        raise TypeError(f"max_norm must be a number, got {value!r}")
    limit = float(value)
    if not limit >= 0:
        raise ValueError(f"max_norm must not be negative, got {limit}")
    return limit


def require_nonfinite(policy: str) -> None:
    """Raises ValueError for something else than a policy."""
    if policy not in NONFINITE:
        raise ValueError(f"nonfinite must be one of {', '.join(NONFINITE)}, got {policy!r}")
