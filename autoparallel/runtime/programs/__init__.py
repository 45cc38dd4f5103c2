"""Runs a rank's program, of one stage or of several.

- ``runner``: a program attached to a model's tensors; ``outputs``: what the user is given; ``compiled``: its
  ``regions``, through ``torch.compile``; ``second_derivatives``: what can be differentiated once only.
- ``pipeline``: a rank's part of a schedule; ``stages``: one of them for a microbatch; ``microbatches``: what a batch is
  cut into; ``tied``: parameters that several stages use.
"""
