"""Chooses a plan: the space of choices, their prices, and the search.

May import ``predict``, ``program``, ``plan``, ``decisions``, ``hardware``, ``pipeline``, ``capture``, ``passes``,
``graph``, ``rules``, ``operators``, ``comm`` and ``placements``.
"""
