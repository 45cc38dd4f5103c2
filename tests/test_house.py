"""The house: which part may know which, measured on the import statements themselves.

A room is a package, or a module in the root of ours. Imports that stand inside of functions, or are there for types
only, count like all others.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel.graph.captured import Captured
from tests.distributed import run_distributed

ROOT = Path(__file__).parent.parent / "autoparallel"
FILES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted([*ROOT.rglob("*.py"), *(ROOT / "passes").glob("*.py")])
}
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
FACES = {"__init__", "__main__", "backend", "integrations", "tools"}
PARTICIPLES = {"asked", "done", "found", "given", "kept", "known", "made", "mine", "own", "seen", "sent", "taken"}
ADVERBS = {"again", "along", "apart", "at", "before", "beside", "between", "each", "inside", "other", "same", "within"}
PUBLIC_NAMES = {("autoparallel.runtime.gradients.accumulation", "done")}


def imports_of(statement: ast.AST) -> set[str]:
    """The modules of ours that an import statement names."""
    names: list[str] = []
    if isinstance(statement, ast.Import):
        names = [alias.name for alias in statement.names]
    elif isinstance(statement, ast.ImportFrom):
        assert not statement.level, "imports are absolute"
        inner = [f"{statement.module}.{alias.name}" for alias in statement.names]
        names = [name if name in FILES else str(statement.module) for name in inner]
    return FILES.keys() & names


@functools.cache
def imports() -> dict[str, set[str]]:
    """Every module of ours, and those that it imports."""
    trees = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
    return {name: {m for node in ast.walk(tree) for m in imports_of(node)} - {name} for name, tree in trees.items()}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


@functools.cache
def rooms() -> dict[str, set[str]]:
    """Every room, and those that its files import."""
    arrows: dict[str, set[str]] = {room_of(module): set() for module in imports()}
    for module, others in imports().items():
        arrows[room_of(module)] |= {room_of(other) for other in others} - {room_of(module)}
    return arrows


def longest_chain(arrows: Mapping[str, set[str]]) -> list[str]:
    """The longest way along imports, from the top down."""
    chains: dict[str, list[str]] = {}
    for name in TopologicalSorter(arrows).static_order():
        chains[name] = [name, *max((chains[other] for other in sorted(arrows[name])), key=len, default=[])]
    return max(chains.values(), key=len)


def may_import(package: str) -> set[str]:
    """The rooms that a package's docstring allows it."""
    text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""
    (sentence,) = re.findall(r"May import\s+(.*?)\.(?:\s|$)", text, flags=re.DOTALL)
    if sentence.startswith("everything"):
        return rooms().keys() - {"backend", "dynamo"}
    return set(re.findall(r"``(\w+)``", sentence))


def test_few_modules_stand_in_the_root() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 12


def test_no_files_and_no_rooms_import_each_other_in_a_circle() -> None:
    for arrows in (imports(), rooms()):
        assert len(list(TopologicalSorter(arrows).static_order())) == len(arrows)  # raises CycleError for a circle


def test_chains_of_imports_are_short() -> None:
    chain = longest_chain(rooms())
    assert len(chain) <= 13, " -> ".join(chain)


def test_imports_stand_at_the_top_of_their_file() -> None:
    def inner(tree: ast.Module) -> Iterator[ast.AST]:
        top = set(map(id, tree.body))
        yield from (node for node in ast.walk(tree) if id(node) not in top and imports_of(node))

    lazy = {name: [node.lineno for node in inner(ast.parse(path.read_text()))] for name, path in FILES.items()}  # type: ignore[attr-defined]
    assert not {name: lines for name, lines in lazy.items() if lines}


def names_in(tree: ast.Module) -> Iterator[str]:
    """The names that a module gives to variables, parameters and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def test_a_name_says_what_it_holds() -> None:
    """A participle or a pronoun says what has become of a thing, not what it is."""
    names = {(file, name.strip("_")) for file, path in FILES.items() for name in names_in(ast.parse(path.read_text()))}
    assert {(file, name) for file, name in names if name in PARTICIPLES} == PUBLIC_NAMES


def test_a_private_function_has_a_verb_or_a_noun() -> None:
    """A participle, a pronoun or an adverb alone says neither what a function does nor what it gives."""
    functions = {
        (file, node.name)
        for file, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and re.fullmatch(r"_[a-z]+", node.name)
    }
    vague = {name for _, name in functions if name[1:] in PARTICIPLES | ADVERBS or re.search(r"(ed|ing)$", name)}
    assert vague <= {"_seed"}, sorted((file, name) for file, name in functions if name in vague)


def test_the_bindings_of_torch_are_named_in_one_place() -> None:
    naming = [module for module, path in FILES.items() if re.search(r"\btorch\._C\.\w+\(", path.read_text())]
    assert naming and all(module.startswith("autoparallel._torch.") for module in naming)


def test_importing_the_package_imports_no_dynamo() -> None:
    """Dynamo is imported at the first call; it takes a third of what an import took with it."""
    program = "import sys, autoparallel; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_what_it_says(package: str) -> None:
    assert rooms()[package] == may_import(package) & rooms()[package], "more than its docstring allows"
    if package != "tools":
        assert may_import(package) == rooms()[package], "its docstring allows what it does not need"


def test_only_the_faces_import_the_compiler() -> None:
    above = {room for room, others in rooms().items() if others & {"api", "compiler"}}
    assert above <= {*FACES, "api"}


def test_the_drawing_shows_every_room_in_the_order_of_imports() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", (ROOT.parent / "docs" / "house.md").read_text(), flags=re.MULTILINE)
    drawn = [room.strip("`").removesuffix("/").removesuffix(".py") for row in rows for room in row.split(", ")]
    assert {*drawn} == rooms().keys() - {"__init__", "__main__"}
    for place, room in enumerate(drawn):
        assert rooms()[room] <= {*drawn[:place], "dynamo"}, f"{room} stands above what it imports"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_names_its_files(package: str) -> None:
    for init in (ROOT / package).rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(init.read_text())) or ""
        files = {path.stem for path in init.parent.glob("[a-z]*.py")} | {
            p.parent.name for p in init.parent.glob("*/*.py")
        }
        assert not files - set(re.findall(r"``(\w+)``", text)), init


@pytest.mark.parametrize("package", PACKAGES)
def test_the_packages_inside_of_one_import_each_other_in_no_circle(package: str) -> None:
    arrows: dict[str, set[str]] = {}
    for module, others in imports().items():
        if room_of(module) == package:
            inner = {other.split(".")[2] for other in others if room_of(other) == package and other.count(".") > 1}
            arrows.setdefault(".".join(module.split(".")[2:3]), set()).update(inner)
    for name, others in arrows.items():
        others.discard(name)
    assert len(list(TopologicalSorter(arrows).static_order())) == len(arrows)


# ------------------------------------------------------------------------------------------------------ while it plans


def _planned() -> tuple[list[str], list[str]]:
    """The functions of ours that stand on the stack when the first operator is priced, from ``compile()`` down; and
    those to which the captured graph is given while it is planned for. A function without a name is part of another."""
    stack: list[str] = []
    given: dict[str, None] = {}
    planning = False

    @functools.cache
    def name_of(code: CodeType) -> str:
        ours = code.co_filename.startswith(str(ROOT)) and not code.co_name.startswith("<")
        return f"{Path(code.co_filename).stem}.{code.co_qualname}" if ours else ""

    def callers(frame: FrameType | None) -> Iterator[str]:
        while frame is not None:
            yield name_of(frame.f_code)
            frame = frame.f_back

    def watch(frame: FrameType, event: str, arg: object) -> None:
        nonlocal planning
        code = frame.f_code
        if event not in ("call", "return") or not (name := name_of(code)):
            return
        if name == "compiler.Compiler._plan":
            planning = event == "call"
        elif name == "options.operator_options" and not stack:
            stack.extend(filter(None, callers(frame)))
        if planning and event == "call":
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(isinstance(frame.f_locals[n], Captured) for n in names if n != "self"):
                given[name] = None

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    sys.setprofile(watch)
    try:
        autoparallel.compile(nn.Linear(4, 4), mesh, example_inputs=(torch.ones(2, 4),))
    finally:
        sys.setprofile(None)
    return stack[: stack.index("api.compile") + 1][::-1], list(given)


@functools.cache
def planned() -> tuple[list[str], list[str]]:
    return run_distributed(_planned, world_size=1)[0]  # type: ignore[no-any-return]


def test_the_way_to_the_first_price_is_short() -> None:
    stack, _ = planned()
    way = stack[stack.index("compiler.Compiler.make_kind") :]
    assert len(way) - 1 <= 5, " -> ".join(way)
    assert len(stack) - 1 <= 8, " -> ".join(stack)
    assert [name for name in stack if "search" in name] == ["planner.Planner.search"]


def test_the_captured_graph_passes_few_functions_on_its_way_through_planning() -> None:
    _, given = planned()
    assert len(given) <= 12, " -> ".join(given)
