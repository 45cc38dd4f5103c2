"""What code that asks for the class of an object (``type(x)``, ``x.__class__``) does with it next."""

from __future__ import annotations

import dis
from functools import cache
from types import CodeType, FrameType

COMPARISONS = ("IS_OP", "COMPARE_OP", "CONTAINS_OP")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR")


def use_behind(frame: FrameType) -> str:
    """What becomes of what the instruction gives that a frame is at: the name of an attribute that is read or set of
    it, or the operator that compares it; empty for anything else."""
    return _use_of(frame.f_code, frame.f_lasti)


def is_attribute_asked(frame: FrameType, name: str) -> bool:
    """Whether a frame is at an instruction that reads an attribute of this name."""
    return frame.f_lasti in _reads_in(frame.f_code, name)


@cache
def _reads_in(code: CodeType, name: str) -> frozenset[int]:
    return frozenset(x.offset for x in dis.get_instructions(code) if x.opname == "LOAD_ATTR" and x.argval == name)


@cache
def _use_of(code: CodeType, offset: int) -> str:
    above = 0  # so many values lie above it on the stack
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if instruction.offset <= offset or name in ("EXTENDED_ARG", "NOP"):
            continue
        if not above and name in ("COPY", "SWAP"):  # type(self).count += 1
            continue
        if not above and name in _ATTRIBUTES:
            return str(instruction.argval)
        if name in COMPARISONS and above <= 1:
            return name
        if not above and not name.startswith(("LOAD_", "PUSH_NULL")) or instruction.opcode in dis.hasjrel:
            return ""
        above += dis.stack_effect(instruction.opcode, instruction.arg)
        if above < 0:
            return ""
    return ""
