"""What a parameter's way costs, when it travels in a bucket with others."""

from __future__ import annotations

from functools import partial

import pytest

from autoparallel.hardware import CPU
from autoparallel.placements import Invariant, Replicate, Shard
from autoparallel.placements.redistribution import BUCKET_BYTES, Redistributor


@pytest.mark.parametrize("share", [0.01, 0.25, 1.0, 3.0])
def test_a_small_parameter_pays_for_its_share_of_the_latency(share: float) -> None:
    """As many of them as fill a bucket cost what one collective of all of them costs; an activation travels alone."""
    redistributor = Redistributor((2,), partial(CPU.step_seconds, (2,)))
    rows = int(share * BUCKET_BYTES) // 4
    rows -= rows % 2
    for before, kind in ((Shard(0), "all_gather"), (Invariant, "all_reduce")):
        alone = CPU.step_seconds((2,), kind, (0,), rows * 4)
        tables = [redistributor.table((rows,), 4, True, True, uneven=uneven) for uneven in (False, True)]
        activation, parameter = (t.seconds[t.index[(before,)], t.index[(Replicate,)]] for t in tables)
        collectives = 2 if before == Shard(0) else 1  # a gather forward and a reduction backward
        saved = collectives * max(0.0, 1 - rows * 4 / BUCKET_BYTES) * CPU.latency
        assert activation >= alone * 0.99
        assert activation - parameter == pytest.approx(saved, abs=1e-9)
