"""Checkpoints: what a training run needs to go on, on any mesh, in files that say when they are not what was saved.

May import ``placements`` and ``_torch``.

- ``tree``: the state of models, optimizers and schedulers as plain values, with tensors by name.
- ``writers``: how a tensor lies, and which of the ranks that have a part of it writes it.
- ``folder``: the folder of one save: its files, their digests, the marker that says it is complete.
- ``saving``, ``loading``: there and back.
- ``conversion``, ``pretrained``: the files of pretrained models, there and back.
"""
