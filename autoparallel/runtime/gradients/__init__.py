"""How parameters reach a program, and how their gradients come back, are added up, reduced and kept.

- ``buckets`` of parameters are gathered together, and their gradients received together; ``lent``: parameters that an
  owner gives with each call.
- ``travel``: over a mesh, many along the same way; ``program_parameters``: what programs gather, for one call or
  several, and who takes the gradients.
- ``store``: a model's gradients are accumulated and synchronised; ``parameter_grads``: the ``.grad`` that scripts see;
  ``backwards``: what a backward pass has under way; ``hook_calls``: when hooks on parameters are called;
  ``derivatives`` of gradients.
- ``accumulation``: windows of several calls.
"""
