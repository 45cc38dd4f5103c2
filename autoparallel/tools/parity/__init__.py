"""One training run, plain and compiled, and what is compared of the two: what ``verify()`` is made of.

- ``task``: what is verified; ``training``: one run of it; ``comparison`` of two, ``noise``: how far rounding moves one.
- ``localize``: the first operator that deviates, by ``localize_capture`` or ``localize_program``, on the graphs that
  ``recording`` runs node by node.
- ``report``: what is printed of it, and raised.
"""
