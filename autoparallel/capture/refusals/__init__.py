"""What no program can have, refused.

- ``refusals``: the messages, with line and cure.
- ``data_access``: ``x.data``, and what is written to the memory of another tensor.
"""
