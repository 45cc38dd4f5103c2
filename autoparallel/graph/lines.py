"""Where in the user's model a node of a trace was made."""

from __future__ import annotations

from torch import fx

_OURS = f'File "{__file__.rpartition("/graph/")[0]}/'


def line_of(node: fx.Node) -> str:
    """The line of the model that made a node, as the trace noted it."""
    lines = str(node.meta.get("stack_trace") or "").strip().splitlines()
    files = [
        i
        for i, line in enumerate(lines)
        if line.lstrip().startswith('File "/') and "/torch/" not in line and not line.lstrip().startswith(_OURS)
    ]
    if files:
        return ": ".join(line.strip().removeprefix("File ") for line in lines[files[-1] : files[-1] + 2])
    # Under torch.no_grad() the trace keeps modules, but no lines.
    modules = [kind for _, kind in (node.meta.get("nn_module_stack") or {}).values()]
    return f"forward of {modules[-1]}" if modules else "an unknown line"
