"""Recurrent models with a first state, and with time before the batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, sgd


def ids(*shape: int, seed: int) -> Tensor:
    return torch.randint(0, 12, shape, generator=torch.Generator().manual_seed(seed))


def series(step: int) -> tuple[Any, ...]:
    """Four rows of six times of eight numbers, and targets."""
    return numbers(4, 6, 8, seed=step), numbers(4, 3, seed=100 + step)


def time_first(step: int) -> tuple[Any, ...]:
    return numbers(6, 4, 8, seed=step), numbers(4, 3, seed=100 + step)


def words(step: int) -> tuple[Any, ...]:
    return ids(4, 6, seed=step), ids(4, 6, seed=100 + step)


def words_time_first(step: int) -> tuple[Any, ...]:
    return ids(6, 4, seed=step), ids(6, 4, seed=100 + step)


@program(batch=series, loss_fn=F.mse_loss, ranks=True)
class ZerosAsFirstState(nn.Module):
    """As most tutorials have it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_dim, self.layer_dim = 5, 2
        self.lstm = nn.LSTM(8, 5, 2, batch_first=True)
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h0 = torch.zeros(self.layer_dim, x.size(0), self.hidden_dim).requires_grad_()
        c0 = torch.zeros(self.layer_dim, x.size(0), self.hidden_dim).requires_grad_()
        out, _ = self.lstm(x, (h0.detach(), c0.detach()))
        return self.fc(out[:, -1, :])


@program(batch=series, loss_fn=F.mse_loss, ranks=True)
class LearnedFirstState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.fc = nn.GRU(8, 5, batch_first=True), nn.Linear(5, 3)
        self.h0 = nn.Parameter(torch.randn(1, 1, 5) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        h0 = self.h0.expand(-1, x.shape[0], -1).contiguous()
        _, h = self.gru(x, h0)
        return self.fc(h[-1])


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(8, 5, 2), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, (h, _) = self.lstm(x)
        return self.fc(h[-1])


class ZerosAsFirstStateTimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.RNN(8, 5, 2), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h0 = torch.zeros(2, x.size(1), 5, dtype=x.dtype, device=x.device)
        out, _ = self.rnn(x, h0)
        return self.fc(out[-1])


class LanguageModel(nn.Module):
    """As the examples of PyTorch have it: time first, and the state of the last call is given."""

    batch_first = False

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(12, 8)
        self.rnn = nn.LSTM(8, 5, 2, batch_first=self.batch_first)
        self.decoder = nn.Linear(5, 12)

    def forward(self, tokens: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return F.log_softmax(self.decoder(output).view(-1, 12), dim=1), hidden

    def init_hidden(self, rows: int) -> Any:
        weight = next(self.parameters())
        return weight.new_zeros(2, rows, 5), weight.new_zeros(2, rows, 5)


class BatchFirstLanguageModel(LanguageModel):
    batch_first = True

    def forward(self, tokens: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output).flatten(0, 1), hidden


def repackage(h: Any) -> Any:
    return h.detach() if isinstance(h, Tensor) else tuple(repackage(v) for v in h)


def carry(run: Run, plain: Any, batch: Any) -> None:
    """A loop of truncated backpropagation, with the state of the last call."""
    hidden = plain.init_hidden(4)
    model = run.compile(plain)
    optimizer = sgd(model)
    for step in range(STEPS):
        tokens, targets = batch(step)
        hidden = repackage(hidden)
        output, hidden = model(tokens, hidden)
        run.note("output", output, grad=True)
        run.note("hidden", hidden)
        loss = F.cross_entropy(output, targets.reshape(-1))
        loss.backward()
        run.note_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
        run.note_state(model)


@loop(ranks=True)
def language_model_with_carried_state(run: Run) -> None:
    carry(run, LanguageModel().double(), words_time_first)


@loop()
def language_model_batch_first(run: Run) -> None:
    carry(run, BatchFirstLanguageModel().double(), words)


class LossInside(LanguageModel):
    def forward(self, tokens: Tensor, hidden: Any, targets: Any = None) -> Any:
        output, hidden = super().forward(tokens, hidden)
        return F.nll_loss(output, targets.view(-1)), hidden


@loop()
def carried_state_and_loss_inside(run: Run) -> None:
    torch.manual_seed(0)
    plain = LossInside().double()
    hidden = plain.init_hidden(4)
    model = run.compile(plain)
    optimizer = sgd(model)
    for step in range(STEPS):
        tokens, targets = words_time_first(step)
        loss, hidden = model(tokens, repackage(hidden), targets)
        run.note("hidden", hidden)
        loss.backward()
        run.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        run.note_state(model)


def translation(step: int) -> tuple[Any, ...]:
    return ids(7, 4, seed=step), ids(5, 4, seed=100 + step)


@program(batch=translation, ranks=True)
class TeacherForcing(nn.Module):
    """Sequence to sequence, time first, as in the tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(12, 8), nn.Embedding(12, 8)
        self.encoder, self.decoder = nn.GRU(8, 5), nn.GRU(8, 5)
        self.out = nn.Linear(5, 12)

    def forward(self, src: Tensor, trg: Tensor) -> Tensor:
        _, hidden = self.encoder(self.source(src))
        batch_size, trg_len = trg.shape[1], trg.shape[0]
        outputs = torch.zeros(trg_len, batch_size, 12)
        word = trg[0]
        for t in range(1, trg_len):
            out, hidden = self.decoder(self.target(word).unsqueeze(0), hidden)
            outputs[t] = self.out(out.squeeze(0))
            word = trg[t] if t % 2 else outputs[t].argmax(1)
        return F.cross_entropy(outputs[1:].view(-1, 12), trg[1:].reshape(-1))


@program(batch=time_first, loss_fn=F.mse_loss)
class CellOverTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.fc = nn.LSTMCell(8, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.size(1), 5)
        c = torch.zeros(x.size(1), 5)
        for i in range(x.size(0)):
            h, c = self.cell(x[i], (h, c))
        return self.fc(h)


@program(batch=lambda step: (numbers(4, 6, 8, seed=step), numbers(4, 5, seed=9), numbers(4, 5, seed=8)))
class CellWithGivenState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.fc = nn.LSTMCell(8, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outs = []
        for xt in x.unbind(1):
            h, c = self.cell(xt, (h, c))
            outs.append(self.fc(h))
        return torch.stack(outs, 1), h.detach(), c.detach()


@program(batch=lambda step: (ids(4, 6, seed=step), torch.tensor([6, 4, 3, 1])))
class PackedWithFirstState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn, self.fc = nn.Embedding(12, 8), nn.GRU(8, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h0 = torch.zeros(1, x.size(0), 5)
        packed = pack_padded_sequence(self.table(x), lengths, batch_first=True)
        out, _ = self.rnn(packed, h0)
        return self.fc(pad_packed_sequence(out, batch_first=True)[0])


@program(batch=lambda step: (numbers(4, 6, 8, seed=step), numbers(2, 4, 5, seed=50 + step)), ranks=True)
class GivenState(nn.Module):
    """Batch first, and the state that torch wants: layers before the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.fc = nn.GRU(8, 5, 2, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
        out, h = self.gru(x, h0)
        return self.fc(out), h.detach()


@program(batch=lambda step: (numbers(4, 4, 8, seed=step), numbers(4, 3, seed=50 + step)), loss_fn=F.mse_loss)
class AsManyTimesAsRows(TimeFirst):
    pass


def shrinking(step: int) -> tuple[Any, ...]:
    """Fewer rows and other times in each step, as the last batch of an epoch has them."""
    return numbers(6 + step, 4 - step, 8, seed=step), numbers(4 - step, 3, seed=50 + step)


@program(batch=shrinking, loss_fn=F.mse_loss, ranks=True)
class FewerRowsTimeFirst(TimeFirst):
    pass


@program(batch=lambda step: shrinking(2 - step), loss_fn=F.mse_loss)
class MoreRowsTimeFirst(ZerosAsFirstStateTimeFirst):
    pass


@program(batch=lambda step: (numbers(4 + step, 8, seed=step),), ranks=True)
class RowsAsTimes(nn.Module):
    """One long sequence, as in the tutorial of tags: the rows are its times."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x.view(len(x), 1, -1))
        return self.out(out.view(len(x), -1))


@program(batch=lambda step: (ids(4, 6 + step, seed=step),), ranks=True)
class OtherLengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(12, 8), nn.LSTM(8, 5, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.table(x))[0].amax(1))
