"""Models that are typed at a prompt or in a notebook, or that ``exec`` is given, whose code has no file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autoparallel

SOURCE = """
import torch

factor = 2.0

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * factor
"""


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("<stdin>", __name__),
        ("<ipython-input-3-0a1b2c3d4e5f>", __name__),
        ("<python-input-0>", __name__),
        ("<string>", __name__),
        ("<recipe>", __name__),
        ("<recipe>", "recipe that is no module"),
    ],
)
def test_what_they_read_around_them_is_watched(name: str, module: str) -> None:
    typed: dict[str, Any] = {"__name__": module}
    exec(compile(SOURCE, name, "exec"), typed)
    model = typed["Model"]()
    compiled, x = autoparallel.compile(model), torch.randn(3, 4)
    before = compiled(x)
    typed["factor"] = 3.0
    torch.testing.assert_close(compiled(x), before * 1.5)
