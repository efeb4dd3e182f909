"""The size of the code, as a table: `python -m tests.house`. tests/test_house.py holds that no class grows too large,
and that constants have a reason.

Product code is what is in `opendiloco` and `peers`. Public names are the classes and functions of modules' top levels
without an underscore in front, and what packages export in `__all__`. Attributes of a class are what its body declares
and what its methods assign to `self`, those of product classes that it inherits from included.
"""

from __future__ import annotations

import ast
import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from tests.test_layering import ROOT, SOURCES, imports, module_name

ATTRIBUTES_AT_MOST = 15
VALUE_BASES = {"BaseModel", "NamedTuple", "Enum", "IntEnum", "StrEnum", "TypedDict"}
"""Of classes that only hold what they are given, however much that is. Frozen dataclasses are others."""

JOIN_TO_BACKWARD = (
    "opendiloco/cli/join.py",
    "opendiloco/volunteer/volunteer.py",
    "peers/driver/driver.py",
    "peers/protocol/peer.py",
    "peers/protocol/step_cycle.py",
    "peers/protocol/trainer.py",
    "peers/protocol/effects.py",
    "peers/protocol/effect_table.py",
    "peers/driver/training.py",
    "opendiloco/volunteer/local_workload.py",
    "opendiloco/workers/group.py",
    "opendiloco/workers/supervisor.py",
    "opendiloco/workers/control.py",
    "opendiloco/workers/worker.py",
    "opendiloco/training/streaming.py",
    "opendiloco/training/inner.py",
    "opendiloco/data/sample_order.py",
    "opendiloco/model/loss.py",
)
"""The files that a reader opens on the way, in its order. Listed by hand, since it crosses tasks and processes."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def lines_of(*folders: str) -> int:
    return sum(len(path.read_bytes().splitlines()) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def public_names() -> int:
    """Return the number of public names; see the module."""
    count = 0
    for path in SOURCES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                count += not node.name.startswith("_")
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                count += len(ast.literal_eval(node.value))
    return count


# Classes -------------------------------------------------------------------------------------------------------------
@cache
def classes() -> dict[str, tuple[ast.ClassDef, list[str]]]:
    """Return each product class by its module and name, with the full names of its bases as far as they are known."""
    found = {}
    for path in SOURCES:
        module = module_name(path)
        imported = {name.rpartition(".")[2]: name for name in imports(path)}
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
                found[f"{module}.{node.name}"] = node, [imported.get(base, f"{module}.{base}") for base in bases]
    return found


def is_value(name: str) -> bool:
    """Return whether a class only holds values; see `VALUE_BASES`."""
    if name.rpartition(".")[2] in VALUE_BASES:
        return True
    node, bases = classes().get(name, (None, []))
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list] if node else []
    return any("frozen=True" in each for each in decorators) or any(map(is_value, bases))


def assigned(targets: list[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        yield from assigned(target.elts) if isinstance(target, ast.Tuple | ast.List) else [target]


def attributes(name: str) -> set[str]:
    """Return the names of a class's attributes; see the module."""
    if name not in classes():
        return set()
    node, bases = classes()[name]
    own = {attribute for base in bases for attribute in attributes(base)}
    for inner in ast.walk(node):
        targets: list[ast.expr] = inner.targets if isinstance(inner, ast.Assign) else []
        if isinstance(inner, ast.AnnAssign | ast.For | ast.AsyncFor):
            targets = [inner.target]
        elif isinstance(inner, ast.withitem) and inner.optional_vars:
            targets = [inner.optional_vars]
        for target in assigned(targets):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                own.add(target.attr)
            elif isinstance(target, ast.Name) and inner in node.body:
                own.add(target.id)
    return own


def large_classes() -> dict[str, int]:
    """Return the classes with more attributes than a class with one job needs, and how many these are."""
    counts = {name: len(attributes(name)) for name in classes() if not is_value(name)}
    return {name: count for name, count in counts.items() if count > ATTRIBUTES_AT_MOST}


# Constants -----------------------------------------------------------------------------------------------------------
def is_number(value: ast.expr) -> bool:
    """Return whether an expression is a number, or calculated with one; or a tuple of such."""
    match value:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()):
            return True
        case ast.BinOp(left=left, right=right):
            return is_number(left) or is_number(right)
        case ast.UnaryOp(operand=operand):
            return is_number(operand)
        case ast.Tuple(elts=[_, *_] as each):
            return all(map(is_number, each))
    return False


def unexplained_constants(text: str) -> list[str]:
    """Return the numbers of a module's top level that have no docstring, and no comment beside or above them."""
    lines, found = ["", *text.splitlines()], []
    body = ast.parse(text).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and is_number(node.value):
            has_docstring = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            beside = any("#" in line for line in lines[node.lineno : (node.end_lineno or node.lineno) + 1])
            above = lines[node.lineno - 1]
            if not (has_docstring or beside or (above.startswith("#") and not above.endswith("---"))):
                found.append(lines[node.lineno])
    return found


# Tasks ---------------------------------------------------------------------------------------------------------------
def bare_tasks(tree: ast.Module) -> list[int]:
    """Return the lines that make a task whose exception may be lost: neither by `start_task` nor in a TaskGroup."""
    groups = {
        ast.unparse(item.optional_vars)
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if item.optional_vars and ast.unparse(item.context_expr).endswith("TaskGroup()")
    }
    found = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        owner, _, name = ast.unparse(call.func).rpartition(".")
        if name in ("create_task", "ensure_future") and owner not in groups:
            found.append(call.lineno)
    return found


# Files ---------------------------------------------------------------------------------------------------------------
def imported_once() -> int:
    """Return the number of modules that exactly one other module imports."""
    modules = {module_name(path) for path in SOURCES if path.name != "__init__.py"}
    importers = Counter[str]()
    for path in SOURCES:
        names = {each for name in imports(path) for each in (name, name.rpartition(".")[0])}
        importers.update(names & modules)
    return sum(count == 1 for count in importers.values())


class Trace:
    """The product files whose functions are called while it `is_on`, in threads that begin later, too."""

    def __init__(self) -> None:
        self.is_on = False
        self.files: set[str] = set()

    def look(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.is_on and event == "call":
            self.files.add(frame.f_code.co_filename)

    def start(self) -> None:
        threading.setprofile(self.look)
        sys.setprofile(self.look)

    def product_files(self) -> int:
        sys.setprofile(None)
        threading.setprofile(None)
        return len(self.files & {str(path) for path in SOURCES})


async def files_of_a_round() -> int:
    """Return how many files two healthy peers of tests/swarm enter: real drivers and links, in this process, and a
    workload without a model. Their rounds are short, so it takes ten of them until each has led and told its news."""
    from tests.swarm.test_driver import swarm, wait_until

    trace = Trace()
    trace.start()
    async with swarm(minimum_peers=2) as run:
        both = [await run.join(), await run.join()]
        await wait_until(both, lambda: min(one.index for one in both) >= 3, "three outer steps")
        start, trace.is_on = both[0].index, True
        await wait_until(both, lambda: min(one.index for one in both) >= start + 10, "ten more")
        trace.is_on = False
        for one in both:
            one.driver.leave()
        await asyncio.gather(*(one.running for one in both))
    return trace.product_files()


def main() -> None:
    missing = [path for path in JOIN_TO_BACKWARD if not (ROOT / path).exists()]
    assert not missing, f"JOIN_TO_BACKWARD names what is gone: {missing}"
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for name, figure in (
        ("product lines", lines_of("opendiloco", "peers")),
        ("modules", len(SOURCES)),
        ("public names", public_names()),
        (f"classes with more than {ATTRIBUTES_AT_MOST} attributes", len(large_classes())),
        ("modules with one importer", imported_once()),
        ("files entered by a round of two healthy peers (traced)", asyncio.run(files_of_a_round())),
        ("files from join to loss.backward() (listed)", len(JOIN_TO_BACKWARD)),
        ("lines of tests", lines_of("tests")),
        ("words of docs", sum(len(page.read_text(encoding="utf-8").split()) for page in pages)),
    ):
        print(f"{figure:>7,}  {name}")


if __name__ == "__main__":
    main()
