"""Graph rewrites, one per file; each opens with a small graph before and after.

May import ``graph``, ``rules``, ``operators``, ``comm``, ``placements``,
``text`` and ``_torch``.
"""
