"""``torch.func.grad``, ``vjp`` and what is made of them, inside of forward.

They differentiate a level of tensors that torch wraps around those of their function, of which no operator is seen. So
a trace has ``torch.autograd.grad`` instead, with respect to leaves in the place of the arguments.  Under ``vmap``,
which runs the function once for all parts, the leaves have all parts, and so has each gradient: that of a part is its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoparallel._torch import transforms
from autoparallel.capture.tracing.derivatives import ones_for
from autoparallel.capture.tracing.stand_ins import replacement
from autoparallel.capture.tracing.trace import Trace, refuse


def _restore_dims(tensor: Tensor, sizes: dict[int, Any]) -> Tensor:
    """A tensor with the dims that ``vmap``s take away, the first ones, those of outer ones before those of inner ones;
    it is repeated along those that it has not.

    Args:
        sizes: of the dims, by the levels of the ``vmap``s.
    """
    sizes = dict(sorted(sizes.items()))
    dims = transforms.batched_dims(tensor)
    whole = transforms.remove_dims(tensor, sizes)
    for i, (level, size) in enumerate(sizes.items()):
        if level not in dims:
            whole = whole.unsqueeze(i).expand(*whole.shape[:i], size, *whole.shape[i:])
    return whole


def _leaf_of(x: Any) -> Any:
    sizes = transforms.running_batches()
    whole = _restore_dims(x, sizes)
    with transforms.untransformed():
        leaf = whole.view_as(whole) if whole.requires_grad else whole.detach().requires_grad_()
    return transforms.take_dims(leaf, [*sizes])


def _call(func: Callable[..., Any], args: Sequence[Any], argnums: Any, has_aux: bool, kwargs: Any) -> Any:
    """What a function makes of leaves in the place of some arguments, and these; what it returns beside that."""
    if transforms.is_differentiating():
        raise refuse(
            "a gradient is taken inside of torch.func.jvp",
            "use torch.func.jacrev, vjp or grad for both, or write one of the derivatives out",
        )
    numbers = range(len(args)) if argnums is None else (argnums,) if isinstance(argnums, int) else argnums
    places = {number % len(args) for number in numbers}
    args = [pytree.tree_map(_leaf_of, x) if i in places else x for i, x in enumerate(args)]
    output, aux = func(*args, **kwargs) if has_aux else (func(*args, **kwargs), None)
    return output, args[argnums] if isinstance(argnums, int) else tuple(args[number] for number in numbers), aux


def _gradients(outputs: Sequence[Any], leaves: Any, seeds: Sequence[Tensor | None], create_graph: bool) -> Any:
    """The gradients of outputs, as the leaves nest; zeros where they do not depend on one.

    Under ``vmap`` they are taken once for all parts that the leaves have, and once for each part of the seeds that the
    leaves have no part of, as those of ``jacrev``, which are the rows of a unit matrix.
    """
    flat, spec = pytree.tree_flatten(leaves)
    pairs = [(x, g) for x, g in zip(outputs, seeds, strict=True) if transforms.below_transforms(x).requires_grad]
    if not pairs:
        return pytree.tree_map(torch.zeros_like, leaves)
    sizes = transforms.running_batches()
    shared = {level: size for level, size in sizes.items() if level in transforms.batched_dims(flat[0])}
    in_seeds = {level for _, g in pairs if g is not None for level in transforms.batched_dims(g)}
    rest = {level: size for level, size in sizes.items() if level in in_seeds - shared.keys()}
    levels = sorted([*rest, *shared])
    wholes = [_restore_dims(x, shared) for x, _ in pairs]
    inputs = list(map(transforms.below_transforms, flat))
    vectors = [None if g is None else _restore_dims(g, rest | shared) for _, g in pairs]
    with transforms.untransformed():
        products = [ones_for(x) if g is None else g for x, g in zip(wholes, vectors, strict=True)]
        places = [levels.index(level) for level in rest]
        if rest:
            products = [g.movedim(places, [*range(len(rest))]).flatten(0, len(rest) - 1) for g in products]
        gradients: Sequence[Tensor] = torch.autograd.grad(
            wholes, inputs, products, create_graph=create_graph, materialize_grads=True, is_grads_batched=bool(rest)
        )
        if rest:
            dims = [*rest.values()]
            gradients = [x.unflatten(0, dims).movedim([*range(len(rest))], places) for x in gradients]
    return pytree.tree_unflatten([transforms.take_dims(x, levels) for x in gradients], spec)


def _grad_and_value(
    _: Trace, original: Any, func: Callable[..., Any], argnums: Any, has_aux: bool, args: Any, kwargs: Any
) -> Any:
    before = torch.is_grad_enabled()
    with torch.enable_grad():
        output, leaves, aux = _call(func, args, argnums, has_aux, kwargs)
        if not isinstance(output, Tensor) or output.dim():
            return original(lambda: output, (), False, (), {})  # torch's error
        gradients = _gradients([output], leaves, [None], create_graph=before)
    output, aux = (output, aux) if before else _detach((output, aux))
    return gradients, (output, aux) if has_aux else output


def _vjp(
    _: Trace, original: Any, func: Callable[..., Any], *primals: Any, argnums: Any = None, has_aux: bool = False
) -> Any:
    before = torch.is_grad_enabled()
    with torch.enable_grad():
        output, leaves, aux = _call(func, primals, argnums, has_aux, {})
    outputs, spec = pytree.tree_flatten(output)

    def multiply(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        seeds, other = pytree.tree_flatten(cotangents)
        if other != spec:
            raise RuntimeError(f"the cotangents of vjp() must nest as its output does: {spec}, not {other}")
        differentiable = torch.is_grad_enabled() if create_graph is None else create_graph
        if differentiable and not before and any(x.requires_grad for x in seeds):
            raise refuse(
                "the function that torch.func.vjp gives under no_grad is differentiated",
                "call torch.func.vjp without no_grad",
            )
        return _gradients(outputs, leaves, seeds, differentiable and before)

    output, aux = (output, aux) if before else _detach((output, aux))
    return (output, multiply, aux) if has_aux else (output, multiply)


def _jvp(
    trace: Trace,
    original: Any,
    func: Callable[..., Any],
    primals: Any,
    tangents: Any,
    argnums: Any,
    *,
    strict: bool = False,
    has_aux: bool,
) -> Any:
    """By two products in reverse mode, as one is linear in its vector: its derivative by that is what goes forward.

    It costs what forward mode does, as nothing else of the first product is left in the program.
    """
    before, vjp = torch.is_grad_enabled(), partial(_vjp, trace, original)
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    with torch.enable_grad():
        output, multiply, *aux = vjp(func, *primals, argnums=numbers, has_aux=has_aux)
        leaves, spec = pytree.tree_flatten(output)
        zeros = [torch.zeros_like(x) for x in leaves]
        _, push = vjp(lambda *vectors: multiply(pytree.tree_unflatten(vectors, spec), create_graph=True), *zeros)
        results = output, pytree.tree_unflatten(push(tangents), spec), *aux
    return results if before else _detach(results)


def _remove_batch_dim(
    _: Trace, remove: Callable[..., Tensor], tensor: Tensor, level: int, size: Any, dim: int
) -> Tensor:
    """Torch moves the dim of the parts to its place by a call that a trace takes for one of a constant."""
    return remove(tensor, level, size, 0).movedim(0, dim) if dim else remove(tensor, level, size, dim)


def _detach(results: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.detach, results)


NAMES: tuple[tuple[Any, str, Any], ...] = (
    replacement(transforms.TRANSFORMS, "grad_and_value_impl", _grad_and_value),
    replacement(transforms.TRANSFORMS, "_vjp_with_argnums", _vjp),
    replacement(transforms.TRANSFORMS, "_jvp_with_argnums", _jvp),
    replacement(transforms.VMAP, "_remove_batch_dim", _remove_batch_dim),
)
"""The names of torch that are replaced while a model is traced."""
