"""Which parameters are stacks of experts, and which operators run expert by expert.

A stack of experts is a parameter that is multiplied one slice at a time: a dim of it is a batch dim of a matrix
product (``b`` of ``"b m k, b k n -> b m n"``), or the experts of a grouped one.  From there the dim of the experts is
followed through the operators that keep it (activations, biases, reshapes) until one sums it up or loses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autoparallel.decisions.parameters import PlanError
from autoparallel.graph.sizes import Sizes
from autoparallel.operators.experts import grouped_linear
from autoparallel.planner.request.presets import Constraints
from autoparallel.rules import Rule, rule_for
from autoparallel.rules.calls import is_tensor, shape_of, tensor_operands


@dataclass(frozen=True)
class Experts:
    """What a graph does expert by expert.

    Attributes:
        parameters: the placeholder of each stack of experts, and its dim of the experts.
        factors: for each operator that runs expert by expert, the factor of its rule that is the experts.
    """

    parameters: dict[fx.Node, int] = field(default_factory=dict)
    factors: dict[fx.Node, str] = field(default_factory=dict)


def find_experts(graph: fx.Graph, parameters: Iterable[str]) -> Experts:
    """The experts of a captured graph; ``parameters`` are the names of its placeholders that are parameters."""
    return _Search(graph, set(parameters)).experts


def experts_of(
    graph: fx.Graph, parameters: Mapping[str, str], constraints: Constraints, axis_sizes: Sequence[int], size: Sizes
) -> Experts:
    """The experts of a captured graph that a preset shards; none for a preset without an axis for them.

    Args:
        parameters: placeholder name to parameter name.

    Raises:
        PlanError: where there are none and the preset needs them, or they do not divide.
    """
    if not constraints.expert:
        return Experts()
    experts = find_experts(graph, parameters)
    if constraints.needs_experts and not experts.parameters:
        raise PlanError(
            "the plan 'expert_parallel' found no experts in the model: stack their weights in one parameter "
            "[experts, in, out] that a batched or grouped matrix product uses, or use plan='data_parallel'"
        )
    count = math.prod(axis_sizes[axis] for axis in constraints.expert)
    for node, dim in experts.parameters.items():
        if size.shape(node)[dim] % count:
            raise PlanError(
                f"{parameters[node.name]} stacks {size.shape(node)[dim]} experts, which do not "
                f"divide by the {count} ranks of the mesh axis 'ep': change the number of experts or the mesh"
            )
    return experts


class _Search:
    def __init__(self, graph: fx.Graph, parameters: set[str]) -> None:
        self.experts = Experts()
        self.weights: set[fx.Node] = set()  # parameters, and what is made of one parameter alone
        self.dims: dict[fx.Node, int] = {}
        for node in graph.nodes:
            if node.op == "placeholder" and node.name in parameters:
                self.weights.add(node)
            elif node.op == "call_function" and is_tensor(node):
                self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        rule, operands = rule_for(node), tensor_operands(node)
        if len(operands) == 1 and operands[0] in self.weights:
            self.weights.add(node)
        if rule is None:
            return
        factor = self._operand_factor(rule, operands) or self._first_factor(node, rule, operands)
        if factor is None:
            return
        if node.target is grouped_linear:
            self.experts.factors[node] = factor
        else:
            dim = rule.dim_of(rule.result, factor)
            if dim is None or dim < 0:
                return  # the experts are summed up
            self.experts.factors[node] = factor
            self.dims[node] = dim
        for x, factors in zip(operands, rule.operands, strict=True):
            at = rule.dim_of(factors, factor)
            if x in self.weights and at is not None and at >= 0:
                self._mark(x, at)

    def _operand_factor(self, rule: Rule, operands: list[fx.Node]) -> str | None:
        """The factor of the experts, where an operand has a dim of experts already."""
        for x, factors in zip(operands, rule.operands, strict=True):
            if x in self.dims and x not in self.weights and factors[self.dims[x]]:
                factor = factors[self.dims[x]][0]
                return None if factor in rule.blocked else factor
        return None

    def _first_factor(self, node: fx.Node, rule: Rule, operands: list[fx.Node]) -> str | None:
        """The factor of the experts, where tokens meet a stack of experts."""
        if node.target is grouped_linear:
            return "e" if operands[1] in self.weights else None
        if not rule.flops or len(operands) < 2:
            return None
        weights = [f for x, f in zip(operands, rule.operands, strict=True) if x in self.weights and len(f) >= 3]
        others = [f for x, f in zip(operands, rule.operands, strict=True) if x not in self.weights]
        for factors in weights:
            for dim in factors:
                everywhere = bool(others) and all(dim in f for f in (*others, rule.result))
                if dim and everywhere and dim[0] not in rule.blocked and isinstance(rule.sizes[dim[0]], int):
                    return dim[0]
        return None

    def _mark(self, node: fx.Node, dim: int) -> None:
        """Follows a stack of experts back to its parameter."""
        chain: list[tuple[fx.Node, str]] = []
        while node.op != "placeholder":
            rule = rule_for(node)
            factors = rule.result[dim] if rule is not None else ()
            at = rule.dim_of(rule.operands[0], factors[0]) if rule is not None and factors else None
            if at is None or at < 0:
                return
            chain.append((node, factors[0]))
            node, dim = tensor_operands(node)[0], at
        if isinstance(shape_of(node)[dim], int):
            self.experts.factors.update(chain)
            self.experts.parameters[node] = dim
