"""What a plan consists of, as plain data.  May import ``placements``, ``pipeline``, ``comm`` and ``data``.

- ``decisions``: all that was decided about a model on a mesh.
- ``parameters``: how a parameter lies, is gathered and reduced; the error of a plan that cannot be.
- ``pipeline``: what is asked of a pipeline, what was decided about it, and what it sends.
- ``meshes``: how devices were factored into mesh axes.
- ``means``: what saves memory for a whole step, or hides what is exchanged.
- ``frontier``: seconds and memory of the plans that were compared.
- ``prediction``: what a plan is predicted to send, take and keep.
"""
