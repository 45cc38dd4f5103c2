"""One training run, plain and compiled, and what is compared of the two: what ``verify()`` is made of."""
