"""Strategies of Lightning for compiled models, one for Fabric and one for the Trainer::

    import autoparallel.integrations.lightning

    fabric = Fabric(strategy="autoparallel", devices=8)
    trainer = Trainer(strategy="autoparallel", devices=8)

and the loop, or the ``LightningModule``, stays as it is. ``Fabric(strategy=AutoparallelStrategy({"dp": 4, "tp": 2}))``
and ``Trainer(strategy=TrainerStrategy({"dp": 4, "tp": 2}))`` say more.

- ``fabric``: the strategy of Fabric.
- ``trainer``: the strategy of the Trainer.
- ``whole_batch``: what both say of the ranks, and of precision.
"""

from autoparallel.integrations.lightning.fabric import AutoparallelStrategy
from autoparallel.integrations.lightning.trainer import TrainerStrategy

__all__ = ["AutoparallelStrategy", "TrainerStrategy"]
