"""What a search chooses from, and what each choice costs.

- ``subject``: what is searched, before anything is permitted or priced; ``space``: what can be chosen, or why there is
  nothing left to choose from.
- ``at_rest``: the layouts of a parameter between steps; ``permits``: what presets and pins leave; ``experts``,
  ``sequences``: which operators run expert by expert, or over the sequence.
- ``problem``: the choices as a factor graph, with ``prices``; ``overlaps``: what chunks of rows hide;
  ``interleaving``: what interleaved pieces cost.
"""
