"""``DTensor``s in the hands of a script: what it makes of parameters, gradients and states is what one process would.

- ``operators``: where torch's ``DTensor`` does not as one process does. Those that draw are in ``draws``, those on
  lists in ``lists``, means of losses in ``losses``, those that take plain tensors, too, in ``mixed``, those that write
  to a part of one in ``writes``, to a tensor beside their operands in ``outs``, and a shape in ``forms``, those that
  parts do not suffice for in ``wholes``.
- ``boundary``: where the program's tensors become those of the script, and which kind of gradient they have.
- ``values``: what Python reads of one; ``stages``: numbers of those of a pipeline's; ``summands``: what is added to
  gradients that are still to be reduced.
"""
