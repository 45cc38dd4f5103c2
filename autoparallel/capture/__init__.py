"""From a model to its forward graph.

May import ``graph``, ``passes``, ``rules``, ``operators``, ``comm``, ``text`` and ``_torch``.

- ``capture``: what is tried, one attempt after another; ``attempt`` is one of them, a trace, whose values are
  ``exports``; ``settings``: what it is for; ``describe`` says what the trace is of.
- ``copies``: of the model, which are traced, with ``fake_inputs`` in the place of a call's; ``training``: what one copy
  computes; ``first_calls``: what is empty at the first one; ``caches``: those of generation, which no program makes;
  ``user_warnings``: a model's own, given once.
- ``functional``: from a trace to a captured graph; its inner packages may import what follows.
- ``tracing``: what decides about gradients beside operators, made visible to a trace.
- ``python``: what a model reads and writes of Python's: attributes, globals, closures.
- ``refusals``: what no program can have.
"""
