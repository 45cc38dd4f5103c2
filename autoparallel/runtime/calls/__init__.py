"""A call of a model: read, told from calls of other kinds, and made.

- ``reader``: what a call is given; ``kinds``: which kind it is, and one program for each.
- ``call``: one call, from its inputs to its outputs; ``rows``: which rows of a batch each rank brings.
"""
