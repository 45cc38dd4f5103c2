"""What a model reads and writes of Python's while it is traced.

- ``recorder``: records what a copy of the model reads and writes of its attributes, of each object in ``watched``,
  and in ``class_state`` of their classes; ``copied_objects`` are where it looks;
  ``changes``: what becomes of what a call changes, and ``bound_buffers`` of what it binds to buffers;
  ``reads``: what its trace depends on; ``observed_classes`` tell it, and code which class
  an object is of, by what it does with that (``classes_asked``); ``containers`` are what it compares:
  ``held_containers`` are those of the copy, ``journals`` stand for those to which a call only adds,
  ``given_entries`` are of those that it reads and changes; ``places`` tell where they are.
- ``shared_parts``: what cannot be copied.
- ``closures``: functions and weak references that a model holds, and that reach into it; ``modules_apart`` are those of
  torch that functions reach beside it.
- ``globals_read``: finds the globals and closures that functions read, ``places_read`` what was there, and ``draws`` of
  generators;
  ``loads`` are what byte code says of a function, ``roots`` the places that it loads from; ``loss_functions`` bring
  more along; ``running_functions`` are behind frames; ``profilers`` are called when functions run.
"""
