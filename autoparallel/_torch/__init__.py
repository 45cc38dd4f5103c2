"""The private parts of torch that we use, in one place: a torch release breaks these files and no others.  Tested with
torch 2.11 to 2.13.  May import nothing of the package.

- ``tensors``: tensors among nested values, their memory and their versions.
- ``autograd``: the engine, its hooks and its functions.
- ``casts``: regions of autocast in a trace.
- ``nn``: modules, their hooks and casts.
- ``dtensor``: what a ``DTensor`` is made of, without the time that its public functions take.
- ``distributed``: process groups, and what carries out their collectives.
- ``export``: what a trace is made with: ``torch.export``, fake tensors, ``torch.fx``.
- ``numbers``: sizes and numbers that it leaves open.
- ``dynamo``: Dynamo and Inductor, which are imported at the first call.
- ``quantisation``: fake quantisation of tensors without data.
- ``optim``: the steps of torch's optimizers.
- ``transforms``: those of ``torch.func``.
"""

import torch

from autoparallel._torch import (
    autograd,
    casts,
    distributed,
    dtensor,
    dynamo,
    export,
    nn,
    numbers,
    optim,
    quantisation,
    tensors,
    transforms,
)

# In a build for CUDA, fake tensors pretend that there are eight GPUs; autograd starts a thread for each that it sees at
# its first backward, and a process with such threads cannot be forked any more. So it has its first one before.
# Devices are counted, as `is_available` would keep every process that is forked from this one from using CUDA.
if torch.backends.cuda.is_built() and not torch.cuda.device_count():
    torch.ones((), requires_grad=True).backward()

__all__ = [
    "autograd", "casts", "distributed", "dtensor", "dynamo", "export", "nn", "numbers", "optim", "quantisation",
    "tensors", "transforms",
]  # fmt: skip
