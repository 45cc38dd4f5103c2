"""From a trace to a captured graph, which has values and no memory.

- ``functional``: a trace as values; ``composites``: what stands for operators that are composed of others and have no
  rule.
- ``passes``: the passes of a capture, in their order.
- ``outputs``: says which output is the loss; ``ways``: makes one program of traces that Python has gone on from a
  value in two ways.
- ``layers``: those that repeat, traced once.
"""
