"""What a traced graph cannot be a program with: refused before it is rewritten, with the line of the model."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoparallel._torch.dtensor import local_of
from autoparallel._torch.export import free_unbacked_symbols
from autoparallel._torch.numbers import OPEN
from autoparallel._torch.tensors import memory_span, share_storage
from autoparallel.capture.refusals.data_access import refused_memory
from autoparallel.graph.captured import Captured
from autoparallel.graph.errors import CaptureError, refusal
from autoparallel.graph.labels import label_in
from autoparallel.graph.leaves import Leaf
from autoparallel.graph.lines import line_of
from autoparallel.graph.plain_tensors import tensor_at
from autoparallel.passes.settle_memory import STRIDED, relative_start
from autoparallel.rules import operator_name
from autoparallel.rules.calls import READS, is_tensor, tensor_operands


class SizedByValuesError(CaptureError):
    """A size, or a number that Python reads, is known only when the program runs."""


def require_static(graph: fx.Graph, numbers: Collection[str]) -> list[str]:
    """Refuses sizes and numbers that are known only when the program runs; what is only checked is left out.

    Args:
        numbers: the placeholders of numbers that the call is given: what is computed of them is no size.

    Returns:
        The lines of the checks.
    """
    checks: list[str] = []
    allowed: set[Any] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, OPEN) and any(map(is_tensor, node.all_input_nodes)):
            if [x.name in numbers for x in node.all_input_nodes] == [True]:
                allowed |= free_unbacked_symbols(value)
            elif (node.target in READS or free_unbacked_symbols(value)) and _is_only_checked(node):
                allowed |= free_unbacked_symbols(value)
                checks.append(line_of(node))
        unknown = [free_unbacked_symbols(v) for v in pytree.tree_leaves(value)]
        if any(symbols - (set() if isinstance(value, torch.Tensor) else allowed) for symbols in unknown):
            if node.target in READS:
                cure = "keep it a tensor (no .item()), or compute it outside of the model and pass it in"
                raise refusal("a tensor's value is read into Python", line_of(node), cure, SizedByValuesError)
            raise refusal("a size depends on a tensor's values", line_of(node), KEEP_ALL_ROWS, SizedByValuesError)
    return checks


def _is_only_checked(node: fx.Node) -> bool:
    """Whether a value that is read into Python ends in assertions (``torch._check``)."""
    return bool(node.users) and all(
        user.target in _CHECKS or user.op == "call_function" and not is_tensor(user) and _is_only_checked(user)
        for user in node.users
    )


_CHECKS = (torch.ops.aten._assert_scalar.default,)


def require_same_memory(graph: fx.Graph) -> None:
    """Refuses ``x.set_(y)``, which a functional graph would take for the use of another tensor."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == "aten::set_":
            raise refused_memory("x.set_(...)", line_of(node))


def require_own_names(model: nn.Module) -> None:
    """Refuses a module, a parameter or a buffer by the name of a method: to read it gives the method."""
    for path, module in model.named_modules():
        for name in (*module._modules, *module._parameters, *module._buffers):
            if inspect.isfunction(inspect.getattr_static(type(module), name, None)):
                raise CaptureError(
                    f"{label_in(path, name)} has the name of a method of {type(module).__name__}, which is what "
                    f"self.{name} reads\nWhat to change: give it another name."
                )


def require_dense(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses a sparse tensor that a model holds: it is traced, priced and cut like a dense one."""
    for name, tensor in tensors.items():
        if not is_dense(tensor):
            raise CaptureError(
                f"{name} is not dense ({tensor.layout}), and only dense tensors are traced\nWhat to change: {_DENSE}."
            )


def refused_sparse(name: str, line: str) -> CaptureError:
    """What says that a model reads a buffer that is not dense; it may have one."""
    return refusal(f"{name}, which is not dense, is read", line, _DENSE)


def require_dense_values(graph: fx.Graph) -> None:
    """Refuses a sparse tensor that a model makes."""
    for node in graph.nodes:
        if is_tensor(node) and not is_dense(node.meta["val"]):
            raise refusal("the model makes a tensor that is not dense", line_of(node), _DENSE)


def is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


_DENSE = (
    "keep it as tensor.to_dense(), or as its indices and values, with index_add_ or index_select in the place of its "
    "product"
)


def require_gradients_of_parameters(captured: Captured, model: nn.Module) -> None:
    """Refuses a buffer, or an attribute, that requires a gradient: each rank's would be of its own rows alone."""
    for node in captured.graph.find_nodes(op="placeholder"):
        name = captured.buffers.get(node.name)
        if name and node.users and tensor_at(model, name).requires_grad:
            cure = "register it as an nn.Parameter; or clear its requires_grad, if nobody reads its gradient"
            raise refusal(
                f"{name}, which is no parameter, requires a gradient, read", line_of(next(iter(node.users))), cure
            )


def require_gradients_apart(captured: Captured, trained: Sequence[torch.Tensor], ranks: int) -> None:
    """Refuses to train what is no part of the model, such as a second module that a closure knows: a program takes
    it for a constant.

    Args:
        trained: the tensors of the user's own to which the backward brings a gradient.
    """
    for tensor in trained:
        if ranks > 1 or isinstance(tensor, torch.nn.Parameter):
            names = {x for x, value in captured.constants.items() if share_storage(value, tensor)}
            readers = (x for node in captured.graph.nodes if node.name in names for x in node.users)
            what = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor that requires a gradient"
            raise refusal(
                f"a {what} of the shape {tuple(tensor.shape)}, which is no part of the model, is trained: it is read",
                line_of(next(readers, captured.graph.output_node())),
                "register it, or its module, in the model (self.head = head); or read it under torch.no_grad(), or by "
                "its detach(), if nobody reads its gradient",
            )


def require_values_of_parameters(captured: Captured, model: nn.Module) -> None:
    """Refuses what a call keeps of a parameter that changes, without a gradient: on several ranks, of which each has a
    part, that is what the parameter was, and the next call would read it."""
    labels: dict[str, tuple[Leaf, ...]] = {
        captured.mutated[i]: (i,) for i in captured.memory if i < len(captured.mutated)
    }
    labels |= {name: tuple(leaves) for name, (_, leaves) in captured.attributes.items()}
    for name, indices in labels.items():
        owners = (captured.memory[i].owner for i in indices if isinstance(i, int) and i in captured.memory)
        for owner in {*owners} & {*captured.parameters.values()}:
            if model.get_parameter(str(owner)).requires_grad or owner in captured.mutated:
                raise refusal(
                    f"a call sets {name} to what lies in the memory of the parameter {owner}, which changes with it,",
                    captured.set_at.get(name, "an unknown line"),
                    "clone() it, or read the parameter where it is needed",
                )


def require_own_dtype(captured: Captured) -> None:
    """Refuses a parameter that a call changes and has in another dtype than the model: its new value would be rounded
    to that at each call."""
    for path, node in zip(captured.mutated, captured.results, strict=False):
        if path in captured.rest_dtypes:
            dtype = str(node.meta["val"].dtype).removeprefix("torch.")
            raise refusal(
                f"a call changes the parameter {path}, which it is given in {dtype}",
                line_of(node),
                "change it in the loop, under torch.no_grad() behind optimizer.step(), or leave out the precision "
                "(param_dtype)",
            )


def require_own_memory(captured: Captured, model: nn.Module) -> None:
    """Refuses a tensor in whose memory another lies that a step or a call changes in place.

    In the plain model both change; here a parameter has memory of its own, and a buffer's new value is written back to
    that buffer.  What nobody changes may share.
    """
    tensors: dict[fx.Node, tuple[str, torch.Tensor, bool]] = {}
    for node in captured.graph.find_nodes(op="placeholder"):
        if name := captured.parameters.get(node.name):
            parameter = model.get_parameter(name)
            changes = parameter.requires_grad or name in captured.mutated
            tensors[node] = name, local_of(parameter), changes
        elif name := captured.buffers.get(node.name):
            changes = name in captured.mutated and name not in captured.rebound
            if changes or node.users:  # an attribute that a hook sets before it is read has no users
                tensors[node] = name, tensor_at(model, name), changes
        elif node.name in captured.constants and node.users:
            tensors[node] = node.name, captured.constants[node.name], False
    spans = sorted((*memory_span(tensor), node.name, node) for node, (_, tensor, _) in tensors.items())
    for i, (device, _, end, _, node) in enumerate(spans):
        for other_device, other_start, _, _, other in spans[i + 1 :]:
            if (other_device, other_start) >= (device, end):
                break
            changed, twin = (node, other) if tensors[node][2] else (other, node)
            if tensors[changed][2]:
                raise refusal(
                    f"{tensors[changed][0]}, which is changed in place, and {tensors[twin][0]} lie in the same memory; "
                    "the latter is read",
                    line_of(next(iter(twin.users), twin)),
                    "keep one of them and make the other of it in forward (self.weight[:4].detach()), register one "
                    "tensor under both names (b.weight = a.weight), or clone() it",
                )


def require_positions(graph: fx.Graph) -> None:
    """Refuses what reads or writes through strides of which nobody can say which elements they name."""
    for node in graph.nodes:
        if node.target in STRIDED and relative_start(node) is None:
            raise refusal(
                "the model reads or writes through strides (as_strided) of a tensor that does not lie in one piece in "
                "memory,",
                line_of(node),
                "slice, index, unfold() or diagonal() it, or make it contiguous() before",
            )


def require_same_dtypes(graph: fx.Graph) -> None:
    """Refuses products of two dtypes, which torch traces and cannot run."""
    for node in graph.nodes:
        dtypes = {x.meta["val"].dtype: None for x in tensor_operands(node)} if node.target in _PRODUCTS else {}
        if len(dtypes) > 1:
            shown = " by ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            error = TypeError(f"{operator_name(node.target)} multiplies {shown}")
            raise refusal(str(error), line_of(node), "give it inputs of the model's dtype, or cast them") from error


_ATEN = torch.ops.aten
_PRODUCTS = (
    _ATEN.linear.default, _ATEN.mm.default, _ATEN.bmm.default, _ATEN.addmm.default, _ATEN.baddbmm.default,
    _ATEN.convolution.default,
)  # fmt: skip


INSTEAD_OF_WAYS = (
    "torch.where(condition, a, b) takes elements of both, torch.cond(condition, f, g, operands) runs one of two "
    "functions; an if that only skips the work on no rows may be left out (out[mask] = expert(x[mask]) does none, and "
    "gives gradients of 0, where there would be None); a check that only raises belongs before the call, and what "
    "Python must know (a largest length) into an argument that is a number"
)
"""What to do instead of going one of two ways by a tensor's value."""

KEEP_ALL_ROWS = (
    "keep all rows and weigh them by masks, such as (loss * mask).sum() / mask.sum(), use torch.where or ignore_index, "
    "give torch.bincount its minlength, or compute it outside of the model and pass it in"
)
"""What to do instead of selecting as many rows as there are by a tensor's values."""


def refused_mutation(target: str, node: fx.Node, model: nn.Module) -> CaptureError:
    kind, _, name = target.partition("_")
    names = list(inspect.signature(model.forward).parameters)
    if kind == "args" and name.isdigit() and int(name) < len(names):
        name = names[int(name)]
    return refusal(
        f"the model changes its input {name or target} in place",
        line_of(node),
        "work on a copy (x = x.clone()); a class that is not yours is given one by a module around it, whose forward "
        "calls it with x.clone()",
    )
