"""Chooses a plan: candidates are proposed, each is searched and predicted, and the best is kept.

May import ``predict``, ``program``, ``plan``, ``decisions``, ``hardware``, ``pipeline``, ``capture``, ``passes``,
``report``, ``graph``, ``rules``, ``operators``, ``comm``, ``placements`` and ``_torch``.

What is asked, and what is answered:

- ``request``: what is asked; ``pins`` and ``presets`` constrain it; ``thresholds`` bound the work.
- ``sequences``: which operators run over the sequence; ``plan_cache`` keeps plans from run to run.
- ``planner``: from a call to a graph, a plan and a program; ``draft`` does so without ranks; ``programs`` makes the
  programs, ``fits`` checks a plan, ``reasons`` tells what another decision would have cost; ``plan_cache`` keeps plans
  between runs.

The loop:

- ``candidates``: the ways to plan that are compared, and the one loop over them; ``evaluation`` plans and predicts one.
- ``proposals``, ``paddings``, ``memory``, ``means``, ``microbatches``, ``meshes``: the generators of candidates.

One search:

- ``layouts``: the cheapest layouts; ``axis_pairs`` where tables are too large; ``solve`` has the solvers.
- ``subject``: what is searched; ``space``: what can be chosen; ``options`` of an operator, ``at_rest`` of a parameter;
  ``permits``: what presets and pins leave of that; ``experts`` and ``interleaving`` find what is special;
  ``signatures`` tell calls that are alike, ``saved_tensors`` what the backward finds of them.
- ``problem``: the choices as a factor graph, with ``prices``, of which ``overlaps`` tells what chunks hide;
  ``infeasible`` explains why there is no plan.
- ``stages``: cuts, schedules and recomputation of a pipeline; ``cuts`` finds the most even, ``stage_rows`` what
  operators cost there.
"""
