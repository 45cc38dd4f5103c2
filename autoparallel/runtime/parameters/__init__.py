"""Parameters as ``DTensor``s at rest, under their own names.

- ``state``: they are made, laid out and loaded; ``initial_values``: the first values of those of the meta device.
- ``slices``: a rank's part of a tensor; ``parts``: what scripts keep of one that lies across ranks.
- ``hooks`` that users register on parameters; ``holders``: optimizers that were made of the plain ones.
"""
