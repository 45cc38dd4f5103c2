"""From a model to its forward graph.

May import ``graph``, ``passes``, ``rules``, ``operators``, ``text`` and ``_torch``.

- ``capture``: what is tried, one attempt after another; ``attempt`` is one of them, a trace; ``describe`` says what the
  trace is of. ``training`` is what is traced, ``outputs`` says which is the loss.
- ``passes``: the passes of a capture, in their order.
- ``layers``: those that repeat, traced once.
- ``tracing``: what decides about gradients beside operators, made visible to a trace: ``functions``
  (``autograd.Function``) and ``backward_hooks``; ``trace`` is what one trace notes of them.
- ``functional``: a trace as values.
- ``composites``: what stands for operators that are composed of others and have no rule.
- ``caches``: those of generation, which no program makes.
- ``positions``: those that count up, of which transformers asks the values.
- ``recorder``: records what a copy of the model reads and writes of its attributes; ``observed_classes`` tell it.
- ``globals_read``: finds the globals and closures that functions read, and draws of Python's and numpy's generators.
- ``checks``: those of values that only raise, left out.
- ``data_access``, ``seeding``, ``refusals``: what no program can have, refused.
- ``user_warnings``: a model's own warnings, given once.
"""
