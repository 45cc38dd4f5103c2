"""From a model to its forward graph.  May import ``rules``, ``operators`` and the passes that bring a graph into shape.

- ``captured``: what is captured of a model: its graph, and the inputs that it is for.
- ``capture``: traces a model, and describes what it traced; ``training`` is what is traced, ``outputs`` says which is
  the loss.
- ``layers``: those that repeat, traced once.
- ``tracing``: what decides about gradients beside operators, made visible to a trace; ``hooks`` are those of tensors.
- ``python_state``: the values of Python's that a trace has read, compared at every call.
- ``recorder``: records what a copy of the model reads and writes of its attributes.
- ``globals_read``: finds the globals and closures that functions read, and draws of Python's and numpy's generators.
- ``plain_tensors``: tensors that a model holds without having registered them.
- ``data_access``, ``seeding``, ``refusals``: what no program can have, refused; ``lines`` finds the line that does it.
"""
