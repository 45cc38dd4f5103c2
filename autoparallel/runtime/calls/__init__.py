"""A call of a model: read, told from calls of other kinds, and made.

- ``reader``: what a call is given; ``kinds``: which kind it is, and one program for each; ``words``: for errors and the
  log.
- ``carried``: what calls are given beside their inputs; ``numbers_set``: numbers of the model that the loop sets
  between calls.
- ``exchange``: what ranks show each other before every call.
- ``call``: one call, from its inputs to its outputs; ``rows``: which rows of a batch each rank brings.
"""
