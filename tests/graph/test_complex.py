"""Complex tensors are differentiated like real ones: in a program, in gradients and norms, across ranks and stages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoparallel
from tests.distributed import run_distributed
from tests.graph.eager import TOLERANCE, Program, difference, rows
from tests.runtime.support import gradients_off, mesh_of, off, parameters_off, placements, raised, whole

REAL = {
    "rfft": lambda m, x: torch.fft.rfft(x @ m.w + m.b).abs().pow(2).mean(),
    "fft over places": lambda m, x: torch.fft.fft(x @ m.w, dim=1).real * m.b,
    "fft2 and back": lambda m, x: torch.fft.ifft2(torch.fft.fft2(x @ m.w) * torch.fft.fft2(x)).real + m.b,
    "irfft": lambda m, x: torch.fft.irfft(torch.fft.rfft(x @ m.w, dim=1), n=x.shape[1], dim=1) + m.b,
    "fftshift": lambda m, x: torch.fft.fftshift(torch.fft.fftn(x @ m.w, dim=(1, 2)), dim=(1,)).imag * m.b,
    "stft": lambda m, x: _spectrogram(x @ m.w) * m.b.sum(),
    "rotary": lambda m, x: _rotate(x @ m.w) + m.b,
    "polar": lambda m, x: torch.polar((x @ m.w).abs(), x + m.b).real,
    "angle": lambda m, x: torch.complex(x @ m.w, x + m.b).angle(),
    "conj": lambda m, x: (torch.complex(x @ m.w, x + m.b).conj() * torch.complex(x, x)).imag,
    "conj, then another shape": lambda m, x: torch.complex(x @ m.w, x + m.b).conj().reshape(x.shape[0], -1).imag,
    "negative imaginary part": lambda m, x: torch.complex(x @ m.w, x + m.b).conj().imag.flatten(1) * 2,
    "hermitian": lambda m, x: (torch.complex(x @ m.w, x).mH @ torch.complex(x, x)).real.sum(1) * m.b,
    "written in place": lambda m, x: _doubled_real(torch.complex(x @ m.w, x + m.b)).abs(),
    "sgn": lambda m, x: torch.sgn(torch.complex(x @ m.w, x)).real * m.b,
    "norm": lambda m, x: torch.linalg.vector_norm(torch.complex(x @ m.w, x)) * m.b,
    "single precision": lambda m, x: torch.complex((x @ m.w).float(), x.float()).abs().double() * m.b,
}
COMPLEX = {
    "a complex weight": lambda m, x: (x.to(m.w.dtype) @ m.w).abs() + m.b,
    "its parts": lambda m, x: x @ m.w.real + x @ m.w.imag + m.b,
    "its adjoint": lambda m, x: ((x.to(m.w.dtype) @ m.w) @ m.w.mH).abs() + m.b,
    "a complex output": lambda m, x: x.to(m.w.dtype) @ m.w + m.b,
}


def _rotate(x: Tensor) -> Tensor:
    angles = torch.arange(24, dtype=torch.float64).reshape(6, 4)
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(2)


def _spectrogram(x: Tensor) -> Tensor:
    window = torch.hann_window(8, dtype=torch.float64)
    return torch.stft(x.flatten(1), 8, window=window, return_complex=True).abs()


def _doubled_real(z: Tensor) -> Tensor:
    z.real.mul_(2)
    return z


@pytest.mark.wide_where(lambda name: name not in list(REAL)[::4])
@pytest.mark.parametrize("name", REAL)
def test_complex_numbers_inside(name: str) -> None:
    assert difference(REAL[name], lambda out: out.sin().sum()) < TOLERANCE


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_parameters_and_outputs(name: str) -> None:
    assert difference(COMPLEX[name], dtype=torch.complex128) < TOLERANCE


def test_complex_inputs_get_gradients() -> None:
    plain = Program(lambda m, x: x @ m.w + m.b, torch.complex128)
    model = autoparallel.compile(copy.deepcopy(plain))
    inputs = [torch.complex(rows(), rows(seed=2)).requires_grad_() for _ in range(2)]
    for m, x in zip((model, plain), inputs, strict=True):
        (m(x) ** 2).real.sum().backward()
    assert off(inputs[0].grad, inputs[1].grad) < TOLERANCE  # type: ignore[arg-type]
    assert gradients_off(model, plain) < TOLERANCE


def test_a_complex_gradient_that_no_dtype_of_a_policy_fits() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    assert difference(COMPLEX["a complex weight"], dtype=torch.complex128, precision=policy) < TOLERANCE


class Filter(nn.Module):
    """A spectral layer between two linears: real and complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, dtype=torch.float64)
        self.filter = nn.Parameter(torch.randn(8, 5, dtype=torch.complex128))
        self.mix = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))
        self.down = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.up(x)) * self.filter.sum(0)
        mixed = torch.fft.irfft(spectrum, n=8).to(torch.complex128) @ self.mix.conj()
        return self.down(mixed.abs())


def _filters(plan: str) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = Filter()
    model = autoparallel.compile(copy.deepcopy(plain), mesh_of(2), plan=plan, loss_fn=nn.functional.mse_loss)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    generator = torch.Generator().manual_seed(3)
    results: dict[str, Any] = {"gradients": 0.0, "norm": 0.0, "clipped": 0.0, "parameters": 0.0}
    for step in range(3):
        for part in range(2):  # the first of them under no_sync()
            x, y = (torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (8, 4))
            nn.functional.mse_loss(plain(x), y).backward()
            if part == 0:
                with model.no_sync():
                    model(x, y).backward()
            else:
                model(x, y).backward()
        results["gradients"] = max(results["gradients"], gradients_off(model, plain))
        lazy = [p for p in plain.parameters() if p.grad is not None and p.grad.is_conj()]
        assert lazy, "the gradient of a conjugate is one that is still to be conjugated, which torch cannot clip"
        for parameter in lazy:
            parameter.grad = parameter.grad.resolve_conj()  # type: ignore[union-attr]
        p = (2.0, 1.0, float("inf"))[step]
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, p)
        assert expected > 0.1
        results["norm"] = max(results["norm"], off(model.clip_grad_norm_(0.1, p), expected))
        results["clipped"] = max(results["clipped"], gradients_off(model, plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        results["parameters"] = max(results["parameters"], parameters_off(model, plain))
    results["placements"] = placements(model)
    state = {name: whole(value) for name, value in model.state_dict().items()}
    model.load_state_dict({name: value * 2 for name, value in state.items()})
    results["state"] = max(off(p, 2 * state[name]) for name, p in model.named_parameters())
    nn.functional.mse_loss(model(x), y).backward()
    results["refused"] = raised(lambda: model.clip_grad_value_(1.0))
    return results


@pytest.mark.wide
@pytest.mark.parametrize("plan", ["auto", "fsdp", "tensor_parallel"])
def test_two_ranks_with_complex_parameters(plan: str) -> None:
    for results in run_distributed(_filters, plan, world_size=2):
        numbers = {k: v for k, v in results.items() if isinstance(v, float)}
        assert len(numbers) == 5 and all(v < TOLERANCE for v in numbers.values()), numbers
        assert "complex numbers have no order" in results["refused"]
        if plan != "auto":
            assert "S" in "".join(results["placements"].values()), results["placements"]


def _cut_at_a_complex_value() -> float:
    torch.manual_seed(0)
    plain = Filter()
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    cuts = ["/aten.fft_irfft#0"]
    pipeline = autoparallel.Pipeline(schedule="1f1b", microbatches=2, cuts=cuts)
    loss = nn.functional.mse_loss
    model = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=loss, pipeline=pipeline)
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (8, 4))
    losses = model(x, y), loss(plain(x), y)
    for value in losses:
        value.backward()
    mine = dict(model.named_parameters())
    held = [(n, p) for n, p in plain.named_parameters() if mine[n].grad is not None and whole(mine[n]).numel()]
    assert held
    return max(off(*losses), *(off(mine[n].grad, p.grad) for n, p in held))  # type: ignore[arg-type]


@pytest.mark.wide
def test_a_pipeline_cut_at_a_complex_value() -> None:
    for difference_ in run_distributed(_cut_at_a_complex_value, world_size=2):
        assert difference_ < TOLERANCE
