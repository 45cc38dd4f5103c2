"""Runs a rank's program behind the face of an ``nn.Module``, and what a training loop asks of it.

May import ``program``, ``plan``, ``decisions``, ``pipeline``, ``passes``, ``graph``, ``rules``, ``operators``,
``comm``, ``checkpoint``, ``placements``, ``text`` and ``_torch``.

- ``module``: the compiled model, ``face`` what it has of the plain one; ``call_reader`` reads a call, ``kinds`` finds
  its kind, ``calls`` makes it, ``runner`` runs one kind, ``compiled`` compiles its body by region; ``rows``: which rows
  of a batch each rank brings.
- ``agreement``, ``exchange``: what ranks say to agree on a call before it; ``replicas``: whether they have the same.
- ``buckets``: how parameters reach the body; ``gradients``: how their gradients come back, and where they are kept;
  ``lent``: parameters that an owner gives with each call; ``backwards``: what a backward pass has under way;
  ``hooks``: hooks on parameters.
- ``accumulation``: windows of several calls.
- ``clipping``, ``limits``, ``norm``, ``norm_program``: the global norm of gradients, and clipping to it;
  ``optimizers``: what watches the optimizers' steps; ``local_steps``, ``owned_steps``: steps on plain tensors, of
  which each rank has its part, or whole ones.
- ``pipeline``, ``stages``, ``microbatches``, ``tied``: the same for a rank's stages; ``messages``: tensors as bytes.
- ``state``, ``slices``: parameters as ``DTensor``s, and a rank's part of them; ``initial_values`` of meta parameters;
  ``whole``: full parameters for a while;
  ``randomness``: the random stream; ``parameter_draws``: random numbers that a script draws on parameters.
- ``meter``: what steps took; ``rerun``: a suspicious step, computed once more.
"""
