"""Lines of the user's model."""

from __future__ import annotations

import pytest
from torch import fx

from autoparallel.capture.refusals.failures import place_of
from autoparallel.graph.lines import noted_line

FILE = "/home/me/torch/model.py"


def test_a_node_is_of_a_line_in_a_directory_of_the_users_that_is_called_torch() -> None:
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = f'  File "{FILE}", line 3, in forward\n    return self.a(x)\n'
    assert noted_line(node) == f'"{FILE}", line 3, in forward: return self.a(x)'


def test_an_error_is_of_a_line_in_such_a_directory() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("\n1 / 0", FILE, "exec"))
    assert place_of(caught.value) == (ZeroDivisionError, [(FILE, 2)])
