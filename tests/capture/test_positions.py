"""Where positions are known to count up, a model of transformers is traced without a mask, as it runs in eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoparallel.graph.captured import Captured
from tests.captures import captured
from tests.models.pretrained import LLAMA

transformers = pytest.importorskip("transformers")
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
LENGTH = 6


class Positions(nn.Module):
    """A Llama that is told its positions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.llama = transformers.LlamaModel(transformers.LlamaConfig(**LLAMA, attn_implementation="sdpa"))

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        if self.kind == "shifted":
            places = 3 + places
        elif self.kind == "packed by a write":
            places[LENGTH // 2 :] -= LENGTH // 2
        elif self.kind == "packed by a remainder":
            places = places % (LENGTH // 2)
        elif self.kind == "in steps of two":
            places = torch.arange(0, 2 * ids.shape[1], 2)
        elif self.kind == "packed through a view":
            part = places.unsqueeze(0)[0, LENGTH // 2 :]
            part -= LENGTH // 2
        out: Tensor = self.llama(ids, position_ids=places[None, :], use_cache=False).last_hidden_state
        return out


def is_causal(graph: Captured) -> bool:
    """Whether attention runs without a mask."""
    calls = [node for node in graph.graph.nodes if node.target is ATTENTION]
    assert len(calls) == LLAMA["num_hidden_layers"]
    return all(len(node.args) > 5 and node.args[3] is None and node.args[5] is True for node in calls)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        pytest.param("plain", True, marks=pytest.mark.wide),
        ("shifted", True),
        pytest.param("in steps of two", False, marks=pytest.mark.wide),
        ("packed by a write", False),
        pytest.param("packed by a remainder", False, marks=pytest.mark.wide),
        pytest.param("packed through a view", False, marks=pytest.mark.wide),
    ],
)
def test_a_mask_is_left_out_where_positions_count_up(kind: str, expected: bool) -> None:
    ids = torch.randint(96, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    model = Positions(kind)
    graph = captured(model, ids)
    assert is_causal(graph) == expected
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    paths = {**graph.parameters, **graph.buffers}
    leaves = [
        graph.constants[n.name] if n.name in graph.constants else values[paths[n.name]] if n.name in paths else ids
        for n in graph.graph.nodes
        if n.op == "placeholder"
    ]
    (result,) = graph.outputs
    assert isinstance(result, int)
    torch.testing.assert_close(graph.module(*leaves)[result], model(ids), rtol=1e-5, atol=1e-6)
