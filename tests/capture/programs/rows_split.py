"""Numbers read of tensors that say how many rows there are: tokens sorted by their experts, and cut at counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.capture.registry import program
from tests.capture.runner import numbers


def tokens(step: int) -> tuple[Any, ...]:
    """Tokens, of which no expert, or one, has none."""
    return (numbers(8, 8, seed=step) + step,)


class Sorts(nn.Module):
    """Each token goes to two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=4)
        out = self.run(x[order // 2], counts) * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // 2, out)

    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """What the experts make of rows that stand in their order."""
        raise NotImplementedError


@program(batch=tokens, ranks=True)
class SplitsByCounts(Sorts):
    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        return torch.cat([e(part) for e, part in zip(self.experts, rows.split(counts.tolist()), strict=True)])


@program(batch=tokens)
class SlicesByCounts(Sorts):
    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        outs, start = [], 0
        for expert, count in zip(self.experts, counts, strict=True):
            end = start + int(count)
            outs.append(expert(rows[start:end]))
            start = end
        return torch.cat(outs)


@program(batch=tokens)
class SlicesByNumpysCounts(Sorts):
    """As DeepSeek's own code."""

    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        outs, start = [], 0
        for i, count in enumerate(counts.cpu().numpy()):
            outs.append(self.experts[i](rows[start : start + count]))
            start += count
        return torch.cat(outs)


@program(batch=tokens)
class SlicesByEnds(Sorts):
    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends = [0, *counts.cumsum(0).tolist()]
        return torch.cat([e(rows[ends[i] : ends[i + 1]]) for i, e in enumerate(self.experts)])


@program(batch=tokens)
class NarrowsByCounts(Sorts):
    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        outs, start = [], 0
        for i, expert in enumerate(self.experts):
            count = counts[i].item()
            outs.append(expert(rows.narrow(0, int(start), int(count))))
            start += count
        return torch.cat(outs)


@program(batch=tokens)
class SplitsAtATensor(Sorts):
    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = torch.tensor_split(rows, counts.cumsum(0)[:-1].cpu())
        return torch.cat([e(part) for e, part in zip(self.experts, parts, strict=True)])


@program(batch=tokens, ranks=True)
class WritesByCounts(Sorts):
    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        out, start = torch.zeros_like(rows), 0
        for expert, count in zip(self.experts, counts.tolist(), strict=True):
            out[start : start + count] = expert(rows[start : start + count])
            start += count
        return out


@program(batch=tokens)
class AddsByCounts(Sorts):
    """In place, to parts that reach beyond the end, to none, and by steps."""

    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        out, (first, second, third, _) = self.experts[0](rows), counts.tolist()
        out[:first] += self.experts[1](rows[:first])
        out[-first - 1 :] *= 2
        out[second : second - 2] = 5.0
        out[third:100] = rows[third:100].cos()
        out[first:].mul_(3)
        out.narrow(0, 0, second).sub_(1)
        out[1::2, :third] = 1.0
        return out


@program(batch=tokens)
class PadsParts(Sorts):
    """And gives the counts out, too."""

    def forward(self, x: Tensor) -> Any:
        counts = torch.bincount(self.router(x).argmax(-1), minlength=4)
        sizes = counts.tolist()
        padded = pad_sequence(x.split(sizes), batch_first=True)
        return self.experts[0](padded.sum(1)) * sizes[0], sizes[1], counts


@program(batch=tokens, ranks=True)
class ReturnsTheFirstRows(Sorts):
    def forward(self, x: Tensor) -> Any:
        count = int((self.router(x)[:, 0] > 0).sum())
        return self.experts[0](x[:count]), self.experts[1](x)


@program(batch=tokens)
class RepeatsByCounts(Sorts):
    """As many rows as there are, which torch reads of what they are multiplied with."""

    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        return rows * self.router.weight[torch.repeat_interleave(torch.arange(4, device=rows.device), counts)]


@program(batch=tokens, ranks=True)
class ViewsWhatAMaskSelects(Sorts):
    """As many in each row."""

    def forward(self, x: Tensor) -> Any:
        best = self.router(x).topk(2, dim=1).indices
        mask = torch.zeros(x.shape[0], 4, dtype=torch.bool, device=x.device).scatter(1, best, True)
        outs = torch.stack([e(x) for e in self.experts], dim=1)
        return outs[mask].view(x.shape[0], 2, 8).tanh().sum(1)


@program(batch=tokens, random=True)
class DrawsForTheFirstRows(Sorts):
    def forward(self, x: Tensor) -> Any:
        count = int((self.router(x)[:, 0] > 0).sum())
        return nn.functional.dropout(self.experts[0](x[:count])).sum(0)
