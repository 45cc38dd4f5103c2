"""From a plan to what one rank runs.  May import ``decisions``, ``graph``, ``operators``, ``passes``, ``pipeline``,
``placements``, ``plan`` and ``rules``.

- ``passes``: THE list of passes.
- ``program``: a rank's program, and what it is made for.
- ``build``: runs the passes on a captured graph.
- ``stages``: the programs of all stages of a pipeline.
- ``requirements``: what a graph must be for that.
"""
