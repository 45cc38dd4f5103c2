"""A captured graph and a call of it, as data.  May import ``operators``, ``comm``, ``placements`` and ``_torch``.

- ``captured``: what is captured of a model: its graph, and the inputs that it is for.
- ``errors``: what cannot be captured, and how that is said; ``leaves``: those of a call's output.
- ``losses``: which output is the loss, and what it weighs.
- ``calls``: one call of the model, its sizes and its microbatches; ``sizes`` are those of tensors in it.
- ``layers``: the layers of a graph, and the runs of those that are alike.
- ``fingerprint``: the digest of a graph.
- ``hooks``: the hooks that a call runs.
- ``python_state``: the values of Python's that a trace has read, compared at every call; ``input_values``: those that
  it has read of the inputs.
- ``beside``: what stands beside the arguments of a call: ``carried_attributes``, those that calls read and change,
  ``drawn_numbers``, those that calls draw of Python's ``random``, and a method that runs in the place of ``forward``.
- ``plain_tensors``: tensors that a model holds without having registered them; ``labels`` tell of what it holds, and
  where; ``surroundings`` are ``variables`` around it.
- ``nesting``: nested values as leaves; ``caches`` of generation and ``records``, objects that hold tensors, among them;
  ``changed_arguments``: the containers that a call changes; ``arrays`` of numpy that it returns.
- ``shared_memory``: results that lie in the memory of what a call is given.
- ``generators``: those of random numbers that are Python's and numpy's.
- ``garbage``: when Python looks for garbage.
- ``lines``: the user's line behind a node or a frame.
"""
