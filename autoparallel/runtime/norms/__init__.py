"""The global norm of gradients as they lie, and clipping by it.

- ``norm``: its arithmetic; ``program``: norms of several groups with one all-reduce.
- ``limits``: which gradients count in which norm; ``clipping`` to it.
"""
