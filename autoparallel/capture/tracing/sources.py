"""The source of what runs: the part of it that an instruction was compiled from, and what stands around that."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import cache
from types import CodeType, FrameType
from typing import NamedTuple


class Place(NamedTuple):
    """The part of a source that an instruction was compiled from; columns as ``ast`` counts them."""

    line: int
    column: int
    end_line: int
    end_column: int

    def is_in(self, node: ast.AST) -> bool:
        place = place_of(node)
        return place is not None and place[:2] <= self[:2] and self[2:] <= place[2:]


def path_to(tree: ast.AST, place: Place) -> list[ast.AST]:
    """The statements and expressions around a place, within the function that it is in, from the outside in."""
    path: list[ast.AST] = []
    node: ast.AST | None = tree
    while node is not None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            path = []
        path.append(node)
        node = next(filter(place.is_in, _parts(node)), None)
    return path


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """What a part of a source is made of; of parts that have no place of their own, theirs."""
    for child in ast.iter_child_nodes(node):
        if place_of(child) is None:
            yield from _parts(child)
        else:
            yield child


def place_of(node: ast.AST) -> Place | None:
    if not isinstance(node, ast.stmt | ast.expr | ast.excepthandler):
        return None
    assert node.end_lineno is not None and node.end_col_offset is not None  # as ast.parse sets them
    return Place(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)


def place_in(frame: FrameType) -> Place | None:
    """The part of the source that a frame is at."""
    return place_at(list(frame.f_code.co_positions())[frame.f_lasti // 2])


def place_at(positions: tuple[int | None, ...]) -> Place | None:
    """The part of the source that an instruction is of; None where Python keeps none (``-X no_debug_ranges``)."""
    line, end_line, column, end_column = positions
    if line is None or end_line is None or column is None or end_column is None:
        return None
    return Place(line, column, end_line, end_column)


@cache
def parse(filename: str) -> ast.Module | None:
    """A file's source, parsed; None where there is none."""
    lines = linecache.getlines(filename)
    try:
        return ast.parse("".join(lines)) if lines else None
    except SyntaxError:
        return None


@cache
def source_of(code: CodeType) -> ast.FunctionDef | None:
    """The source of a function; None where there is none."""
    tree = parse(code.co_filename)
    functions = (x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)) if tree is not None else ()
    lines = (code.co_name, code.co_firstlineno)
    return next((x for x in functions if (x.name, _first_line(x)) == lines), None)


def _first_line(function: ast.FunctionDef) -> int:
    """The line at which Python says that a function begins: that of its first decorator."""
    return min([function.lineno, *[x.lineno for x in function.decorator_list]])
