"""Chooses a plan: candidates are proposed, each is searched and predicted, and the best is kept.

May import ``predict``, ``program``, ``plan``, ``decisions``, ``hardware``, ``pipeline``, ``capture``, ``passes``,
``report``, ``graph``, ``rules``, ``operators``, ``comm``, ``placements``, ``text`` and ``_torch``.

From the ground up:

- ``solve``: minimises a sum of tables: numbers alone; ``calls``: how each call may run; ``thresholds`` bound the work.
- ``request``: what is asked.
- ``space``: what can be chosen, and its prices; ``layouts``: the cheapest, by ``axis_pairs`` where tables are too
  large; ``infeasible`` explains why nothing fits.
- ``stages``: cuts, schedules and recomputation of a pipeline.
- ``fits`` checks a plan, ``programs`` makes its programs.
- ``candidates``: the ways to plan that are compared, who proposes them, and what each is worth.
- ``planner``: from a call to a graph, a plan and a program; ``draft`` does so without ranks; ``plan_cache`` keeps plans
  from run to run; ``reasons`` tells what another decision would have cost.
"""
