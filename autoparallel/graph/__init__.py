"""From a model to its forward graph.  May import ``rules``, ``operators`` and the passes that bring a graph into shape.

- ``captured``: what is captured of a model: its graph, and the inputs that it is for.
- ``capture``: traces a model, and describes what it traced.
- ``layers``: those that repeat, traced once.
"""
