"""What ranks tell each other before they enter a collective, and whether they have the same.

- ``agreement``: all ranks are about to do the same.
- ``messages``: tensors as bytes; ``dtensors``: operators that a script calls on parameters; ``mixed``: those that take
  plain tensors, too; ``writes``: those that write to a part of one; ``values``: what Python reads of one; ``stages``:
  numbers of those of a pipeline's; ``files``: what pickle writes of one.
- ``replicas`` lie alike on several ranks; ``randomness``: where in the stream of random numbers a process stands.
"""
