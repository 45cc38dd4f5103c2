"""What ranks tell each other before they enter a collective, and whether they have the same.

- ``agreement``: all ranks are about to do the same; ``messages``: tensors as bytes.
- ``replicas`` lie alike on several ranks; ``randomness``: where in the stream of random numbers a process stands.
- ``files``: whose part of a tensor it is that pickle writes.
"""
