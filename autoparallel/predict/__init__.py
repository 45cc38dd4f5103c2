"""What a step costs: arithmetic, traffic, time and memory, from the program that runs.

May import ``runtime``, ``program``, ``plan``, ``decisions``, ``hardware``, ``passes``, ``graph``, ``rules``,
``operators``, ``comm``, ``placements`` and ``_torch``.

- ``cost``: what operators and exchanges take; ``optimizer``: what is kept between steps, and how long updates take.
- ``dry_run``: the runtime on tensors without values, behind a ``communicator`` that counts and keeps time; ``meter``
  has the clock and the ledger, ``fusion`` what compiled kernels move, ``attention`` and ``unseen`` what operators do
  not show, ``results`` what they make.
- ``predict``: a step of one program; ``stages``: of a pipeline; ``forecast``: from fewer layers, where they repeat.
- ``pipeline_traffic``: what a pipeline sends.
- ``reductions``: when gradients are reduced, and what that costs.
"""
