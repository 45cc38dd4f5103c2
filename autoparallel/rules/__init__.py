"""How each operator may be sharded: one rule per operator, in factor notation.

May import ``operators``, ``placements`` and ``_torch``.

- ``core``: what a rule is, its notation, and how a call's rule is made of it.
- ``table``: every operator's row.
- ``pointwise``, ``matmul``, ``convolution``, ``reductions``, ``losses``, ``indexing``, ``shapes``, ``layers``,
  ``random``: what depends on a call's arguments, by family.
- ``selections``: the rule of what is made of as many rows as values select; ``flat_calls``: its graphs as one;
  ``answers``: questions whether there is any, which make no difference where there is none.
- ``registry``: the rule of a call, the user's own among them.
- ``typing``: the ways in which an operator may run on one mesh axis, by its rule.
- ``ways``: those of a call, and the layouts that they need and give.
- ``localize``: the local call, where arguments speak of global sizes or positions.
- ``calls``: reading a call: its tensor operands, its arguments by name, its shapes and dims.
"""

from autoparallel.rules.core import Rule, RuleError
from autoparallel.rules.registry import has_rule, operator_name, register_rule, rule_for

__all__ = ["Rule", "RuleError", "has_rule", "operator_name", "register_rule", "rule_for"]
