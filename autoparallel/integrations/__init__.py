"""Other people's training loops, as their users write them; each file needs the package that it is named after.

A compiled model is one model on one device to them, which happens to be a mesh: every rank is given the same batches,
and losses and metrics are those of the whole batch.

May import ``_torch``, ``api``, ``checkpoint``, ``comm``, ``planner`` and ``runtime``.

- ``accelerate``: an ``Accelerator``.
- ``booster``: the ``Booster`` of Colossal-AI, which needs nothing.
- ``lightning``: strategies of Fabric and of the Trainer.
- ``optimizers``: whether one holds all that a model trains, whose gradients are clipped together.
- ``trackers``: what a meter says, for TensorBoard.
- ``transformers``: a ``Trainer``.
"""
