"""The ways to plan that are compared, and who proposes them.

- ``candidates``: a candidate, and the one loop over them; ``evaluation``: what one is worth.
- ``proposals``: what is proposed for a mesh, by ``paddings`` of vocabularies, ``memory``, further ``means`` that save
  it, and ``pipelines``; ``meshes``: the mesh itself.
"""
