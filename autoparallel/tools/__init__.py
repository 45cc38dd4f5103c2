"""The command line, and what it does beside training.  May import everything but the faces of ``torch.compile``.

- ``cli``: the commands; ``plan``: plans without ranks; ``sources``: the models that commands are given;
  ``answers``: what of them is kept from run to run.
- ``launch``: a function on ranks of this machine, for notebooks.
- ``verify``: any model against eager autograd, on real processes (``processes``); ``parity`` has its parts.
- ``calibration``: measures the hardware.
"""
