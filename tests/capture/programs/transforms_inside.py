"""Derivatives by ``torch.func`` in forward, under ``vmap`` too: of samples, Jacobians, Laplacians, inner steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

from tests.capture.programs.inplace import Two
from tests.capture.registry import program
from tests.capture.runner import numbers


class Field(Two):
    """Has an energy of a row."""

    def energy(self, row: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(row))).square().sum()


@program(ranks=True)
class GradientOfASum(Field):
    def forward(self, x: Tensor) -> Tensor:
        return -grad(lambda z: self.energy(z))(x)


@program(ranks=True)
class GradientsOfRows(Field):
    def forward(self, x: Tensor) -> Tensor:
        return vmap(grad(self.energy))(x)


@program()
class ValueBesideGradient(Field):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        forces, energies = vmap(grad_and_value(self.energy))(x)
        return energies, forces


@program()
class MoreBesideGradient(Field):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def energy(row: Tensor, scale: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            h = torch.tanh(self.a(row)) * scale
            return h.square().sum(), (h, scale)

        (forces, scales), (h, _) = vmap(grad(energy, argnums=(0, 1), has_aux=True), in_dims=(0, None))(x, x.mean())
        return forces + h, scales


@program(ranks=True)
class JacobiansOfRows(Field):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(vmap(jacrev(lambda row: torch.tanh(self.a(row))))(x).sum(1))


@program()
class JacobiansInForwardMode(Field):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(vmap(jacfwd(lambda row: torch.tanh(self.a(row))))(x).sum(1))


@program(ranks=True)
class Laplacians(Field):
    """As in the residual of a differential equation."""

    def forward(self, x: Tensor) -> Tensor:
        return vmap(lambda row: torch.trace(hessian(self.energy)(row)))(x) + vmap(self.energy)(x)


@program()
class HessianOfTwoArguments(Field):
    def forward(self, x: Tensor) -> Tensor:
        def energy(u: Tensor, v: Tensor) -> Tensor:
            return (torch.tanh(self.a(u)) * self.b(v)).sum()

        (uu, uv), (vu, vv) = vmap(hessian(energy, argnums=(0, 1)))(x, x.flip(1))
        return uu.sum(1) + uv.sum(2) + vu.sum(1) * vv.sum(2)


@program()
class TransformedThrice(Field):
    def forward(self, x: Tensor) -> Tensor:
        def along(row: Tensor) -> Tensor:
            return self.energy(row) * row[0]

        return vmap(grad(lambda row: grad(lambda r: grad(along)(r)[0])(row)[1]))(x)


@program(ranks=True)
class GradientsOfSamples(Field):
    """Of the weights, for each sample, clipped each: as in private training."""

    def forward(self, x: Tensor) -> Tensor:
        def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
            return functional_call(self.a, weights, (row,)).tanh().square().sum()

        weights = {name: w.detach() for name, w in self.a.named_parameters()}
        grads = vmap(grad(loss), in_dims=(None, 0))(weights, x)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        clip = (1.0 / norms).clamp(max=1.0)
        step = {name: (g.flatten(1) * clip[:, None]).mean(0).view_as(weights[name]) for name, g in grads.items()}
        return self.b(F.linear(x, step["weight"], step["bias"])) + self.a(x)


@program(ranks=True)
class InnerStep(Field):
    """Differentiated through, as in meta-learning."""

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.a.named_parameters())
        for _ in range(2):
            slopes = grad(lambda w: functional_call(self.a, w, (x,)).tanh().square().mean())(weights)
            weights = {name: w - 0.1 * slopes[name] for name, w in weights.items()}
        return self.b(functional_call(self.a, weights, (x,)).tanh())


@program()
class InnerStepOfEachTask(Field):
    """As many steps at once as there are rows."""

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.a.named_parameters())

        def adapt(row: Tensor) -> Tensor:
            slopes = grad(lambda w: functional_call(self.a, w, (row,)).tanh().square().mean())(weights)
            adapted = {name: w - 0.1 * slopes[name] for name, w in weights.items()}
            return functional_call(self.a, adapted, (row.flip(0),))

        return self.b(vmap(adapt)(x))


@program(ranks=True)
class VectorJacobianProducts(Field):
    """Its function is called twice, the second time under ``no_grad``."""

    def forward(self, x: Tensor) -> Tensor:
        (h, y), multiply = vjp(lambda z: (torch.tanh(self.a(z)), self.b(z)), x)
        (product,) = multiply((h, torch.ones_like(y)))
        with torch.no_grad():
            (other,) = multiply((y, h))
        return product + other * y


@program()
class Divergence(Field):
    """By a probe, as in continuous normalising flows."""

    def forward(self, x: Tensor) -> Tensor:
        probe = torch.sign(x)
        speed, multiply = vjp(lambda z: self.b(torch.tanh(self.a(z))), x)
        return speed + (multiply(probe)[0] * probe).sum(1, keepdim=True)


@program()
class ZerosForWhatIsNotUsed(Field):
    def forward(self, x: Tensor) -> Tensor:
        unused, used = grad(lambda u, v: self.energy(v), argnums=(0, 1))(x.clone(), x)
        none = grad(lambda u: x.sum())(x.clone())
        return used + unused + none


@program()
class UnderNoGrad(Field):
    """A transform differentiates there, too; what it gives has no gradient to the weights then."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            forces = vmap(grad(self.energy))(x)
        return self.b(forces.detach()) + self.a(x)


@program()
class InsideOfTwo(Field):
    """The leaf has no part of the outer one, whose rows the energy has."""

    def forward(self, x: Tensor) -> Tensor:
        points = torch.linspace(-1.0, 1.0, 3, dtype=x.dtype)

        def of_row(row: Tensor) -> Tensor:
            return vmap(grad(lambda t: self.energy(row * t)))(points)

        return vmap(of_row)(x) + self.a(x)[:, :3]


@program()
class AlongAnotherDim(Field):
    def forward(self, x: Tensor) -> Tensor:
        columns = self.a(x).t()
        return vmap(grad(lambda column: self.energy(column)), in_dims=1, out_dims=1)(columns).t()


@program()
class GradientBesideDropout(Field):
    """In evaluation the dropout does nothing: the numbers of a trace are others."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5).eval()

    def train(self, mode: bool = True) -> GradientBesideDropout:
        super().train(mode)
        self.dropout.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return grad(lambda z: self.dropout(self.b(self.a(z).tanh())).square().sum())(x)


@program(ranks=True)
class DirectionalDerivative(Field):
    """As of a mean flow: by the input and the time, and a target that follows from it."""

    def forward(self, x: Tensor) -> Tensor:
        time = x.mean(1, keepdim=True)

        def speed(z: Tensor, t: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(z))) * t

        u, change = jvp(speed, (x, time), (2 * x, torch.ones_like(time)))
        return u - (x - time * change).detach()


@program()
class DirectionsOfDerivatives(Field):
    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones_like(x)
        _, curvature = jvp(vmap(grad(self.energy)), (x,), (ones,))
        _, second = jvp(lambda z: jvp(self.a, (z.square(),), (ones,))[1], (x,), (x,))
        tangents = vmap(lambda row: jvp(lambda z: torch.tanh(self.a(z)), (row,), (row.flip(0),))[1])(x)
        return curvature + second + tangents


@program()
class DirectionUnderNoGrad(Field):
    """Of two results, and of what the function gives beside them."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (a, b), (da, db), rest = jvp(lambda z: ((self.a(z), self.b(z).tanh()), z.sum()), (x,), (x,), has_aux=True)
            y, multiply = vjp(self.a, x)
        return a * da + b * db + rest + multiply(torch.ones_like(y))[0] + self.b(x)


@program(refused="call torch.func.vjp without no_grad")
class ProductsOfNoGrad(Field):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            _, multiply = vjp(self.a, x)
        return multiply(self.b(x))[0]  # refused


@program(refused="pass them in with in_dims=0")
class DrawsOfParts(Field):
    """Each row would have numbers of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return vmap(lambda row: self.a(row) * torch.rand(8, dtype=row.dtype), randomness="different")(x)  # refused


@program(random=True)
class DrawForAllParts(Field):
    def forward(self, x: Tensor) -> Tensor:
        return vmap(lambda row: self.a(row) * torch.rand(8, dtype=row.dtype), randomness="same")(x)


@program(refused="pass them in with in_dims=0")
class DropsOfParts(Field):
    def forward(self, x: Tensor) -> Tensor:
        return vmap(grad(lambda row: self.energy(F.dropout(row, 0.5))), randomness="different")(x)  # refused


@program(refused="write the derivative out, put it into")
class GradientOfAFunctionOfItsOwn(Field):
    """Of an ``autograd.Function``, which a trace does not see into."""

    def forward(self, x: Tensor) -> Tensor:
        return grad(lambda z: Doubles.apply(self.a(z)).sum())(x)  # refused


class Doubles(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any) -> Any:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2


@program()
class GradientsForABatchOfVectors(Field):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = torch.tanh(self.a(x))
        vectors = torch.eye(2, 8, dtype=x.dtype)[:, None, :].expand(2, *y.shape)
        (gradients,) = torch.autograd.grad(y, x, vectors, create_graph=True, is_grads_batched=True)
        return self.b(gradients).sum(0)


@program(refused="take no more than 256")
class TooManyRows(Field):
    def forward(self, x: Tensor) -> Tensor:
        wide = jacrev(lambda z: self.a(z).repeat(1, 33))(x)  # refused
        return self.b(x) + wide.sum()


@program(ranks=True)
class NumbersBesideScalarsOfParts(Field):
    """``vmap`` makes tensors of numbers that one computes with."""

    def forward(self, x: Tensor) -> Tensor:
        def energy(row: Tensor) -> Tensor:
            e = self.energy(row)
            return 2 * e + (e * e) / 3 + e.sqrt() ** 1.5 - torch.where(e > 1, e, 0.1)

        return vmap(grad(energy))(x).sum(1) + vmap(lambda row: 2 * self.energy(row.float().double()))(x)


@program(batch=lambda step: (numbers(4, 8, seed=step), step + 2, 0.1 * (step + 1)))
class OpenNumbersBesideScalarsOfParts(Field):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, power: int, rate: float) -> Tensor:
        def energy(row: Tensor) -> Tensor:
            self.calls += 1
            return self.energy(row) * power / rate + self.calls

        return vmap(grad(energy))(x).sum(1) + vmap(energy)(x)


@program()
class SinglePrecisionOfParts(Field):
    def forward(self, x: Tensor) -> Tensor:
        scalars = vmap(lambda row: 0.1 * row.float().square().sum() + 1)(x)
        return self.a(x) * scalars.double().unsqueeze(1) + self.b(x)


@program(ranks=True)
class AccelerationsOfALagrangian(Field):
    """Solved for each row: ``vmap`` takes apart what factorizes into that and an error."""

    def forward(self, x: Tensor) -> Tensor:
        def acceleration(row: Tensor) -> Tensor:
            curvature = hessian(self.energy)(row)
            mass = curvature @ curvature.t() + torch.eye(8)
            force = grad(self.energy)(row)
            inverse = torch.linalg.inv(mass) @ torch.linalg.cholesky(mass)
            return torch.linalg.solve(mass, force) + inverse @ force + torch.linalg.lu_factor(mass)[0].sum()

        return vmap(acceleration)(x)


@program(ranks=True)
class DerivativesOfSolutions(Field):
    """A factorization is a part of what is differentiated."""

    def forward(self, x: Tensor) -> Tensor:
        def energy(row: Tensor) -> Tensor:
            matrix = torch.outer(row, row) + 8 * torch.eye(8) + self.a.weight @ self.a.weight.t()
            return torch.linalg.solve(matrix, self.b(row)).sum() + torch.linalg.inv(matrix).square().sum()

        return vmap(grad(energy))(x)


@program()
class ResultsAlongOtherDims(Field):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        times = torch.linspace(0.0, 1.0, 5, dtype=x.dtype)
        path = vmap(lambda time: torch.tanh(self.a(x) * time), out_dims=1)(times)
        pairs = vmap(lambda row, w: {"a": self.b(row), "b": (row * w).sum()}, (0, None), {"a": -1, "b": 0})(x, x[0])
        return path, pairs["a"] * pairs["b"]


@program(refused="is_grads_batched=True")
class ProductsWithVectorsUnderVmap(Field):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.b(x)
        return vmap(lambda v: torch.autograd.grad(y, x, v, create_graph=True)[0])(y[None])  # refused


@program(refused="call it for all parts at once")
class FunctionOfItsOwnUnderVmap(Field):
    def forward(self, x: Tensor) -> Tensor:
        return vmap(lambda row: Doubles.apply(self.a(row)))(x)  # refused


class Normed(nn.Linear):
    """A layer of the user's, whose forward runs while the module has other weights."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x)).tanh()


@program(ranks=True)
class VmapOfLayersOfTheUsers(nn.Module):
    """An ensemble of those, as its base is, or handed to vmap."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(Normed(), nn.Linear(8, 4)) for _ in range(3)]
        weights, _ = torch.func.stack_module_state(layers)  # type: ignore[arg-type]
        self.names = list(weights)
        self.weights = nn.ParameterList(weights.values())
        self.base = [layers[0]]

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(zip(self.names, self.weights, strict=True))
        mapped = vmap(partial(functional_call, self.base[0]), (0, None))
        first = functional_call(self.base[0], {name: w[0] for name, w in weights.items()}, x)
        return mapped(weights, x).mean(0) + first
