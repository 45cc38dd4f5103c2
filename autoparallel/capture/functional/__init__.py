"""From a trace to a captured graph, which has values and no memory.

- ``functional``: a trace as values; ``composites``: what stands for operators that are composed of others and have no
  rule; ``in_place``: writes to memory of which there is one name, as new values; ``batch_norms``,
  which write and do not say so; ``factorizations``: those of ``vmap``, which raise their errors.
- ``passes``: the passes of a capture, in their order.
- ``outputs``: says which output is the loss.
- ``ways``: those that a call may take by a tensor's value, as one program; ``detours``: all of them, where some meet
  before the end; ``way_graphs``: what is read of their graphs; ``returned_numbers``: numbers that both return.
- ``selections``: what is made of as many rows as values select; ``row_checks``: whether two masks select as many;
  ``row_counts``: how many, as their masks count them; ``inner_graphs``: how it, and a way, become one call.
- ``sizes``: as expressions of those of the inputs, each computed once.
- ``layers``: those that repeat, traced once.
- ``devices``: where it was traced, forgotten.
"""
