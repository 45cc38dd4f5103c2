"""Factorizations that raise errors, under ``vmap`` too.

``vmap`` takes them apart: into one that tells whether it has failed, and one that raises, with a token that keeps their
order, which no program has.

Before:
    ex = aten.linalg_inv_ex(x);  inverse = ex[0];  info = ex[1]
    effects = with_effects(token, aten._linalg_check_errors, info, 'linalg.inv', is_matrix=False)
After:
    inverse = aten.linalg_inv(x)
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx
from torch.export import ExportedProgram

from autoparallel import _torch
from autoparallel.graph.lines import marks_of

aten = torch.ops.aten

_WHOLE: dict[Any, Any] = {
    aten._linalg_solve_ex.default: aten.linalg_solve.default,
    aten.linalg_inv_ex.default: aten.linalg_inv.default,
    aten.linalg_cholesky_ex.default: aten.linalg_cholesky.default,
}
"""What gives the first result alone, and raises; it has a rule."""


def restore_errors(program: ExportedProgram) -> ExportedProgram:
    """Has each factorization raise its own error; ``program`` as it is where something else has a token, too."""
    effects = _torch.export.find_effects(program.graph)
    if not effects or any(node.args[1] is not aten._linalg_check_errors.default for node in effects):
        return program
    for node in effects:
        _restore(cast(fx.Node, cast(fx.Node, node.args[2]).args[0]))
    return _torch.export.without_effects(program)


def _restore(factorization: fx.Node) -> None:
    whole = _WHOLE.get(factorization.target)
    if whole is None:
        factorization.kwargs = {**factorization.kwargs, "check_errors": True}
        return
    for item in [x for x in factorization.users if x.target is operator.getitem and x.args[1] == 0]:
        with factorization.graph.inserting_before(item):
            new = factorization.graph.call_function(whole, factorization.args, factorization.kwargs)
        new.meta = {"val": item.meta["val"], **marks_of(item)}
        item.replace_all_uses_with(new)
