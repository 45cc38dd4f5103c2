"""What pipeline schedules are: which rank runs which stage, and in which order.  May import nothing of the package.

- ``schedules``: the action lists of every schedule, and playing them.
- ``torch_schedules``: those that are torch's own, the private parts of ``torch.distributed.pipelining``.
"""
