"""Decisions in words: tables, pictures and one HTML file.

May import ``decisions``, ``hardware``, ``pipeline``, ``placements``, ``comm`` and ``text``.

- ``explain``: a plan; with ``meshes``, how its mesh was chosen, and ``pipeline``, its stages and schedule.
- ``reasons``: why a module's decisions were made.
- ``diff``: what two plans decide differently; ``comparison``: plans side by side.
- ``html``: a report as one file; ``pipeline_chart`` draws a schedule in it.
"""
