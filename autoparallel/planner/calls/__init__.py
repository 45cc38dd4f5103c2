"""The calls of a graph: which are alike, how each may run on a mesh, and what the backward finds of it.

- ``signatures``: what makes two calls alike; ``options``: the ways to run one, and their prices.
- ``saved_tensors``: what the backward finds of what a graph computes.
"""
