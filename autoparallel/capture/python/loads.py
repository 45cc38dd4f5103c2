"""What the byte code of a function says that it reads."""

from __future__ import annotations

import dis
import types
from functools import cache

from autoparallel.capture.python.classes_asked import COMPARISONS


class Loads:
    """What a function's byte code loads: globals and cells, with the attributes that are read of them at once.

    Attributes:
        first: the attributes that are read of its first argument.
        imports: the modules that it imports, with what it reads of them.
        bases: the attributes that are read of ``super()``.
        compared: the globals in lines that compare, where the function asks for the type of something;
            ``asks_class``: whether it does by ``__class__``.
        filled: the globals into which the function stores by a key, as into a cache.
        bound: the globals and cells that it binds; those among them that it does not load are ``stored``.
    """

    def __init__(self, code: types.CodeType) -> None:
        chains: dict[str, set[tuple[str, ...]]] = {"globals": set(), "cells": set(), "first": set(), "imports": set()}
        chain: list[str] = []
        kind = module = ""
        imported: dict[str, str] = {}  # the local names of modules
        bases: set[str] = set()
        is_super = False
        lines: dict[int | None, set[tuple[str, ...]]] = {}  # the globals by the lines that load them
        comparing: set[int | None] = set()  # the lines that compare
        self.asks_class = False
        filled, bound, loaded = set[str](), set[str](), set[str]()
        before = last = ("", "")  # the two instructions before
        line: int | None = None

        def end() -> None:
            if len(chain) > (kind == "first"):
                chains[kind].add(tuple(chain[kind == "first" :]))
            if chain and kind == "globals":
                lines.setdefault(line, set()).add(tuple(chain))
            chain.clear()

        for instruction in dis.get_instructions(code):
            name, value = instruction.opname, str(instruction.argval)
            self.asks_class |= name == "LOAD_ATTR" and value == "__class__"
            if name == "STORE_SUBSCR" and before[0] in ("LOAD_GLOBAL", "LOAD_NAME"):
                filled.add(before[1])
            before, last = last, (name, value)
            if name in ("STORE_GLOBAL", "STORE_DEREF"):
                bound.add(value)
            elif name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"):
                loaded.add(value)
            if chain and name in ("LOAD_ATTR", "LOAD_METHOD"):
                chain.append(value)
                continue
            if chain and name in ("COPY", "DUP_TOP"):  # steps.count += 1
                continue
            if chain and name == "STORE_ATTR":
                chain.append(value)
            end()
            line = instruction.positions.lineno if instruction.positions else None
            if name in COMPARISONS:
                comparing.add(line)
            if name == "LOAD_SUPER_ATTR" or is_super and name in ("LOAD_ATTR", "LOAD_METHOD"):
                bases.add(value)
            is_super = name in ("LOAD_GLOBAL", "LOAD_NAME") and value == "super" or is_super and name not in _READS
            if name in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
                chain, kind = [value], "globals"
            elif name in ("LOAD_DEREF", "LOAD_CLASSDEREF", "STORE_DEREF") and value in code.co_freevars:
                chain, kind = [value], "cells"
            elif name == "IMPORT_NAME":
                module = value
            elif name == "IMPORT_FROM":
                chains["imports"].add((module, value))
            elif name == "STORE_FAST" and module:
                imported[value], module = module, ""
            elif name.startswith("LOAD_FAST") and value in imported:
                chain, kind = [imported[value]], "imports"
            elif name.startswith("LOAD_FAST") and code.co_argcount and value == code.co_varnames[0]:
                chain, kind = [value], "first"
        end()
        self.globals, self.cells, self.first, self.imports = map(frozenset, chains.values())
        self.bases, self.filled = frozenset(bases), frozenset(filled)
        self.bound, self.stored = frozenset(bound), frozenset(bound - loaded)
        compared = [loaded for at, loaded in lines.items() if at in comparing]
        self.compared = frozenset().union(*compared if self.asks_class or ("type",) in self.globals else ())


_READS = ("LOAD_ATTR", "LOAD_METHOD", "POP_TOP", "STORE_FAST", "RETURN_VALUE")
"""What ends the call of ``super``."""


@cache
def loads_of(code: types.CodeType) -> Loads:
    """What a function's byte code loads."""
    return Loads(code)
