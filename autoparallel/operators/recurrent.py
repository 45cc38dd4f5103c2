"""Recurrent layers of torch, whose several results are one tensor with a row for each sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def recurrent(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    kind: str,
    biases: bool,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> Tensor:
    """All results of an LSTM, a GRU or an RNN: [rows, numbers], of each row the last states and then the outputs.

    Args:
        x: ``[rows, steps, inputs]``, or ``[steps, rows, inputs]`` unless ``batch_first``.
        states: the first ones, ``[layers and directions, rows, width]``; two of an LSTM.
        weights: as torch lists them.
        kind: the operator's name in torch: ``lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``.
        biases, layers, bidirectional: as torch has them.  There is no dropout between the layers.
    """
    if hasattr(x, "fake_mode"):  # torch's own would fix the sizes
        rows, steps = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
        widths = [state.shape[0] * state.shape[2] for state in states]
        return x.new_empty(rows, sum(widths) + steps * (1 + bidirectional) * states[0].shape[2])
    run = getattr(torch.ops.aten, kind).input
    states = [state.contiguous() for state in states]  # as cuDNN wants them, where a rank has some of the rows
    before = states if kind == "lstm" else states[0]
    train = any(w.requires_grad for w in weights)
    outputs, *last = run(x, before, list(weights), biases, layers, 0.0, train, bidirectional, batch_first)
    parts = [*(state.transpose(0, 1) for state in last), outputs if batch_first else outputs.transpose(0, 1)]
    return torch.cat([part.flatten(1) for part in parts], 1)
