"""Pipelines: where a model is cut, and what its stages cost.

- ``stages``: cuts, schedules and recomputation; ``cuts``: the most even; ``rows``: what operators cost there;
  ``steps``: what layers that run again save.
"""
