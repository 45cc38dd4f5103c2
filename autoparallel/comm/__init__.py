"""How ranks talk: groups and what goes through them, collectives with their transposes, and what they send.

May import ``placements``, ``text`` and ``_torch``.

- ``world``: the ranks there are, the names of mesh axes, and a mesh over them.
- ``current``: what is in force on a thread.
- ``communicator``: collectives over a mesh, and messages between two ranks.
- ``groups``: process groups by the names that programs know them by, and the communicator behind a group.
- ``collectives``: every redistribution as an operator with its backward; packed transfers.
- ``in_flight``: a redistribution in two halves, so that others compute between them.
- ``simulate``: all ranks of a mesh as threads of one process.
- ``traffic``: counts what a program sends.
- ``ranges``: names in a profile.
- ``waiting``: waits for other ranks, and names the one that is missing.
"""
