"""What no program can have, refused.

- ``refusals``: what a traced graph is refused for, with line and cure.
- ``failures``: how tracing itself fails, in words of the model.
- ``data_access``: ``x.data``, and what is written to the memory of another tensor.
"""
