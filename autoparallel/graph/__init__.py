"""From a model to its forward graph.  May import ``rules``, ``operators`` and the passes that bring a graph into shape.

- ``captured``: what is captured of a model: its graph, and the inputs that it is for.
- ``capture``: traces a model, and describes what it traced.
- ``data_access``: watches, while a model is traced, what it does beside autograd: ``x.data``, writes to shared memory.
- ``outputs``: which output is the loss, and what it weighs.
- ``refusals``: what no program can be made of, refused with its line.
- ``layers``: those that repeat, traced once.
- ``python_state``: the values of Python's that a trace has read, compared at every call.
- ``recorder``: records what a copy of the model reads and writes of its attributes.
- ``globals_read``: finds the globals and closures that functions read, and draws of Python's and numpy's generators.
- ``plain_tensors``: tensors that a model holds without having registered them.
"""
