"""Complex tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.capture.registry import program
from tests.capture.runner import tokens


@program(ranks=True)
class FourierMixer(nn.Module):
    """FNet."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.fft.fft(self.a(x), dim=-1).real)


@program(ranks=True)
class SpectralFilter(nn.Module):
    """A learned complex filter, kept as pairs of real numbers (GFNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.filter = nn.Linear(8, 8), nn.Parameter(torch.randn(5, 2) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.fft.rfft(self.a(x), dim=-1, norm="ortho")
        return torch.fft.irfft(h * torch.view_as_complex(self.filter), n=8, dim=-1, norm="ortho")


@program(batch=tokens, ranks=True)
class ComplexRotary(nn.Module):
    """Rotary embeddings as Llama's first code has them."""

    freqs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)
        angles = torch.outer(torch.arange(6.0), 1.0 / 100 ** (torch.arange(0, 4, 2) / 4))
        self.register_buffer("freqs", torch.stack([angles.cos(), angles.sin()], -1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(nn.functional.one_hot(x, 8).to(self.q.weight.dtype)).view(*x.shape, 2, 2, 2)
        turned = torch.view_as_complex(q) * torch.view_as_complex(self.freqs)[:, None, :]
        return torch.view_as_real(turned).flatten(2)


@program()
class Polar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.size, self.angle = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.polar(self.size(x).exp(), self.angle(x))
        return torch.view_as_real(z * z.conj() + z)


@program(ranks=True)
class ComplexParameter(nn.Module):
    """A diagonal state-space layer: complex poles."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4)
        self.pole = nn.Parameter(torch.complex(torch.rand(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).to(torch.complex128)
        state = h * self.pole
        return (state * self.pole + h).abs()


@program()
class ComplexLinear(nn.Module):
    """A complex matrix product, phase and modulus."""

    def __init__(self) -> None:
        super().__init__()
        self.re, self.im = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(torch.complex128) @ torch.complex(self.re, self.im)
        return z.abs() + z.angle()


@program()
class ComplexOutput(nn.Module):
    """The output itself is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.a(x))


@program()
class ShortTimeFourier(nn.Module):
    """A spectrogram loss, as in speech."""

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.register_buffer("window", torch.hann_window(8))

    def forward(self, x: Tensor) -> Tensor:
        spec = torch.stft(self.a(x), 8, 4, window=self.window, return_complex=True, center=True)
        return spec.abs().clamp(min=1e-3).log()


@program()
class RealAndImaginary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.a(x).view(-1, 4, 2).contiguous())
        return torch.cat([z.real * z.imag, z.conj().imag], -1)


@program(ranks=True)
class ViewsOfAnotherDtype(nn.Module):
    """What autograd saves is a view of a parameter in another dtype, or the conjugate of one."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs, self.scale = nn.Parameter(torch.randn(8, 4, 2)), nn.Parameter(torch.randn(8, 4))
        self.turns, self.weight = (nn.Parameter(torch.randn(8, 4, dtype=torch.complex128)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.pairs) * self.scale + self.turns.conj() * self.weight
        h = self.turns.imag * self.scale + torch.view_as_real(self.weight)[..., 1] * self.scale
        return x @ (z.real + z.imag + h + self.turns.conj().imag * self.scale)
