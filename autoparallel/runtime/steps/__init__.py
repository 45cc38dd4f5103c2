"""What happens when an optimizer steps.

- ``optimizers``: gradients are whole, clipped where asked for.
- ``cuts``: into what a step may be cut; ``twins``: what it runs on in place of the optimizer.
- ``local_steps``: a step on the tensors that lie on this rank; ``host_steps``: the same, with states in host memory;
  ``owned_steps``: on whole parameters, each of which one rank updates.
- ``scalers``: a gradient scaler finds the same on all stages of a pipeline.
"""
