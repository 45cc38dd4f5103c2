"""What decides about gradients and values beside operators, made visible to a trace.

- ``trace``: what one trace notes; ``tracing`` has torch's functions note it, and ``replacements`` those
  that it cannot hear of; ``stand_ins``: functions that run other code.
- ``derivatives``: gradients that a model takes; ``transforms``: those by ``torch.func``;
  ``functions``: ``autograd.Function``;
  ``copied_checkpoints``: those that run modules again; ``backward_hooks``: those of tensors and modules.
- ``attention_kernels``: those that a model lets attention run on.
- ``open_places``: parts of tensors at places that values tell; ``overlaps``: those that are written to each other.
- ``kinds_of_numbers``: what a model is told that asks for the type of a size; ``functions_of_numbers`` that are open.
- ``positions``: those that count up, of which transformers asks the values; ``spans``: what it masks at random.
- ``continuations``: on what it depends how Python goes on from where it asks for a value; ``live_names``: variables;
  ``waiting_values``: what waits beside them.
- ``checks``: those of values that only raise, left out; ``texts``: those of values, which are read or ``messages``;
  ``errors``: who catches what is raised; ``sources``: what stands in the source around an instruction;
  ``refused_calls``: of functions that do what no program does;
  ``drawn_numbers`` and ``drawn_scalars``: what is drawn one by one;
  ``tensor_attributes``: what the user has set on tensors; ``values_read``: what torch's own functions read of values;
  ``open_numbers``: functions of torch that fix numbers, composed of those that do not; ``extremes``: ``max``, ``min``;
  ``numbers_read``: what Python reads, and ``inputs_read``: what of that follows from the inputs;
  ``unique_values``: as many as there are; ``packed_sequences``: for recurrent layers.
"""
