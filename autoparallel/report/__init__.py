"""Decisions in words, as blocks: tables and pictures, which are printed as text or as one HTML file.

May import ``decisions``, ``hardware``, ``pipeline``, ``placements``, ``comm`` and ``text``.

- ``words``: what reports call a layout, a traffic, a range of layers.
- ``explain``: a plan; with ``meshes``, how its mesh was chosen, ``frontier``, what was compared, and ``pipeline``,
  its stages and schedule.
- ``trace``: a predicted step for Perfetto.
- ``reasons``: why a module's decisions were made.
- ``diff``: what two plans decide differently; ``comparison``: plans side by side.
- ``progress``: what is being done, while it takes long.
- ``html``: blocks as one file; ``text`` prints them for a terminal.
"""
