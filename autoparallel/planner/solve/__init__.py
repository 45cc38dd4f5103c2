"""Minimises a sum of cost tables over discrete variables: numbers alone, no graph and no plan.

Imports nothing of the package but itself.

- ``factors``: tables and where they stand.
- ``elimination``: exact minimisation, one variable after the other; ``kinds``: layers that are alike; ``layered``: the
  same with each kind of layers eliminated once.
- ``budget``: within a limit on a second sum.
- ``hubs``: a bound, and what it leaves, where tables are too large; ``integer_program`` and ``highs``: the fallback.
"""
