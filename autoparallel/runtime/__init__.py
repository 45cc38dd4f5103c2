"""Runs a rank's program behind the face of an ``nn.Module``, and what a training loop asks of it.

May import ``program``, ``plan``, ``decisions``, ``pipeline``, ``passes``, ``graph``, ``rules``, ``operators``,
``comm``, ``checkpoint``, ``placements``, ``text`` and ``_torch``.

From the ground up, each knowing only those above it:

- ``parameters``: as ``DTensor``s at rest.
- ``ranks``: what ranks tell each other before they enter a collective.
- ``dtensors``: what a script computes of parameters and gradients is what one process would.
- ``gradients``: how parameters reach a program, and how their gradients come back.
- ``norms``: the global norm, and clipping by it.
- ``steps``: what happens when an optimizer steps.
- ``programs``: a rank's program is run, of one stage or of several.
- ``calls``: a call of a model is read, told from calls of other kinds, and made.
- ``module``: the compiled model, ``face`` what it has of the plain one; ``whole``: full parameters for a while;
  ``meter``: what steps took; ``rerun``: a suspicious step, computed once more.
"""
