"""The test models themselves: seeded, trainable in float64, and fed with rows that differ."""

from __future__ import annotations

import pytest
import torch

from tests.models import NAMES, build


def loss_of(case, step=0, rows=8):
    args, kwargs = case.make_batch(step, rows)
    if case.loss_fn is None:
        return case.model(*args, **kwargs)["loss"]
    return case.loss_fn(case.model(*args[:-1], **kwargs), args[-1])


@pytest.mark.parametrize("name", NAMES)
class TestModels:
    def test_every_parameter_gets_a_gradient(self, name):
        case = build(name)
        loss = loss_of(case)
        loss.backward()
        for key, parameter in case.model.named_parameters():
            assert parameter.dtype == torch.float64
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key

    def test_seed_decides_weights_and_batches(self, name):
        first, second, third = build(name), build(name), build(name, seed=1)
        pairs = list(zip(first.model.parameters(), second.model.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b in pairs)
        assert not all(
            torch.equal(a, b) for a, b in zip(first.model.parameters(), third.model.parameters(), strict=True)
        )
        torch.testing.assert_close(first.make_batch(3, 8), second.make_batch(3, 8), rtol=0, atol=0)

    def test_rows_and_steps_differ(self, name):
        case = build(name)
        for step in (0, 1):
            args, kwargs = case.make_batch(step, 8)
            data = args[0] if args else kwargs["input_ids"]
            assert len({tuple(row.flatten().tolist()) for row in data}) == 8
        (args0, kwargs0), (args1, kwargs1) = case.make_batch(0, 8), case.make_batch(1, 8)
        assert not torch.equal(args0[0] if args0 else kwargs0["input_ids"], args1[0] if args1 else kwargs1["input_ids"])

    def test_tied_names_are_one_parameter(self, name):
        case = build(name)
        names = dict(case.model.named_parameters(remove_duplicate=False))
        for group in case.tied:
            assert len({id(names[n]) for n in group}) == 1


@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2"])
def test_halves_of_a_batch_hold_different_numbers_of_valid_tokens(name):
    args, kwargs = build(name).make_batch(0, 8)
    targets = args[-1] if args else kwargs["labels"]
    quarters = [(part != -100).sum().item() for part in targets.chunk(4)]
    assert len(set(quarters)) == 4
