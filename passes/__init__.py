"""Graph rewrites, one per file; each opens with a small graph before and after.

- ``runner``: what a list of passes is, and the one function that runs it; ``history`` shows what each has made.
- ``specification``: what a rank's program must be, derived from the rules; ``verify_placements`` holds programs to it,
  once ``restore_program`` has undone what says only when and how often calls run.
- ``name_modules``: what a profile shows of a program.
- ``emitter``: inserts calls; ``refusal``: a call that no program can make.
- ``adapt_captured``: what is done to a captured graph before programs are made of it.

May import ``graph``, ``rules``, ``operators``, ``comm``, ``placements``, ``text`` and ``_torch``.
"""
