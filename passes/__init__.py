"""Graph rewrites, one per file; each opens with a small graph before and after.

In the order in which a model meets them:

- a trace as ``torch.export`` leaves it: ``replace_random_operators``, ``expand_row_losses``, ``inline_gradient_modes``;
- once it is decomposed: ``write_derivatives``, ``resolve_opaque_calls``, ``resolve_control_flow``;
- what becomes a captured graph: ``defer_numbers``, ``canonicalize_operators`` (with ``settle_memory``,
  ``canonicalize_layers`` and ``ungroup_experts``), ``unflatten_products``, ``raise_row_views``,
  ``interleave_projections``, ``mark_gradients``, ``weigh_loss`` (which follows rows with ``follow_batch``),
  ``name_nodes``, ``mark_layers``;
- a captured graph: ``pad_vocabulary``, ``leave_out_layers``, ``mark_batch``, ``cut_stages``; ``adapt_captured`` says
  when; ``sort_calls``, where ranks have traced them in other orders;
- what becomes a rank's program: ``set_device``, ``settle_interleaving``, ``specification``, ``insert_collectives``,
  ``hoist_parameter_chains``, ``bucket_collectives``, ``find_divisors``, ``chunk_linears``, ``recompute_layers``,
  ``chunk_loss``, and ``overlap_collectives`` or ``split_weight_gradients``;
- a program that is profiled: ``name_modules``.

Beside them:

- ``runner``: what a list of passes is, and the one function that runs it; ``history`` shows what each has made.
- ``specification``: what a rank's program must be, derived from the rules; ``verify_placements`` holds programs to it,
  once ``restore_program`` has undone what says only when and how often calls run.
- ``emitter``: inserts and replaces calls.

May import ``graph``, ``rules``, ``operators``, ``comm``, ``placements``, ``text`` and ``_torch``.
"""
