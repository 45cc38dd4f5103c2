"""One 0/1 program, solved by HiGHS through scipy, here or in a process of its own.

HiGHS's presolve does not always look at the clock (github.com/ERGO-Code/HiGHS/issues/2226), so that a search which must
go on can only end it from outside.  Run as a script, this file reads a program from its standard input and writes what
was found to its standard output; it imports nothing of the package, so that it starts at once.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_GRACE = 10.0  # seconds beyond its limit after which HiGHS is ended


@dataclass(frozen=True)
class Program:
    """Minimise ``objective @ x`` with ``equal @ x == right`` and ``weight @ x <= most``, where 0 <= x <= upper; the
    first ``binaries`` are whole numbers; ``equal`` is the rows, the columns and the values of its entries."""

    objective: Array
    upper: Array
    equal: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Array]
    right: Array
    weight: Array
    most: float
    binaries: int


@dataclass(frozen=True)
class Found:
    """What HiGHS says.

    Attributes:
        x: the best that was found, if anything was.
        bound: no x is below it; minus infinity where nothing was proved.
        infeasible: whether no x satisfies the constraints.
        message: in its words.
    """

    x: Array | None
    bound: float
    infeasible: bool
    message: str


def solve(program: Program, seconds: float | None = None) -> Found:
    """Solves a program, within so many seconds where they are given.

    Raises:
        TimeoutError: when HiGHS did not look at the clock.
        RuntimeError: when its process failed.
    """
    if seconds is None:
        return _solve(program, None)
    command = [sys.executable, "-P", __file__]
    try:
        message = pickle.dumps((vars(program), seconds))
        process = subprocess.run(command, input=message, capture_output=True, timeout=seconds + _GRACE, check=False)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"HiGHS did not end within {seconds + _GRACE:.0f} s") from error
    if process.returncode:
        raise RuntimeError(f"HiGHS failed: {process.stderr.decode(errors='replace').strip()[-500:]}")
    return Found(**pickle.loads(process.stdout))


def _solve(program: Program, seconds: float | None) -> Found:
    from scipy import optimize, sparse  # takes a third of a second to import, and few searches come here

    rows, cols, values = program.equal
    columns = len(program.objective)
    equal = sparse.coo_array((values, (rows, cols)), shape=(len(program.right), columns)).tocsr()
    constraints = [optimize.LinearConstraint(equal, program.right, program.right)]
    if np.isfinite(program.most):
        constraints.append(optimize.LinearConstraint(sparse.csr_array(program.weight[None]), ub=program.most))
    scale = np.abs(program.objective).max(initial=0.0) or 1.0  # seconds to numbers near 1
    options: dict[str, float] = {"mip_rel_gap": 0.0} | ({} if seconds is None else {"time_limit": seconds})
    result = optimize.milp(
        program.objective / scale,
        integrality=np.concatenate([np.ones(program.binaries), np.zeros(columns - program.binaries)]),
        bounds=optimize.Bounds(0.0, program.upper),
        constraints=constraints,
        options=options,
    )
    bound = result.mip_dual_bound
    proved = -np.inf if bound is None or not np.isfinite(bound) else float(bound) * scale
    return Found(result.x, proved, result.status == 2, str(result.message))  # 2: scipy's word for infeasible


if __name__ == "__main__":
    data, limit = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(pickle.dumps(vars(_solve(Program(**data), limit))))
