"""A class has one job, and few attributes for it; a constant has a reason."""

from __future__ import annotations

import ast

import pytest

from tests.house import ATTRIBUTES_AT_MOST, JOIN_TO_BACKWARD, bare_tasks, large_classes, tree_of, unexplained_constants
from tests.test_layering import ROOT, SOURCES, is_in, module_name

NOT_YET_EXPLAINED = ("peers.protocol",)
"""Rooms whose constants need no reason yet: they are about to be replaced."""


TASKS_OF_THEIR_OWN = ("peers.values.system", "peers.transfer", "opendiloco.training")
"""`start_task` itself; and rooms that await each task that they make."""


def test_no_class_has_many_attributes() -> None:
    assert not large_classes(), f"more than {ATTRIBUTES_AT_MOST} attributes: split by their jobs"


def test_the_way_from_join_to_the_backward_pass_names_files_that_are_there() -> None:
    assert all((ROOT / path).exists() for path in JOIN_TO_BACKWARD)


def test_each_numeric_constant_says_its_unit_and_why_it_is_so() -> None:
    """In a comment on its line or the one above, or a docstring below it."""
    modules = [path for path in SOURCES if not any(is_in(module_name(path), room) for room in NOT_YET_EXPLAINED)]
    found = {module_name(path): unexplained_constants(path.read_text(encoding="utf-8")) for path in modules}
    assert not {name: lines for name, lines in found.items() if lines}


def test_a_constant_without_a_reason_is_found() -> None:
    bare = ["A = 1", "B: float = -2.5", "C, D = 3, 1 << 4", "E = A + 5", "# A part's heading -----", "F = 6"]
    explained = ["G = 7  # seconds", "# Of all.", "H = 8", "I = 9", '"""Bytes."""']
    not_numbers = ["J = True", "K = A", 'L = "10"', "M = ()"]
    found = unexplained_constants("\n".join([*bare, *explained, *not_numbers]))
    assert found == [line for line in bare if not line.startswith("#")]


def test_tasks_are_made_where_no_exception_of_them_is_lost() -> None:
    modules = [path for path in SOURCES if not any(is_in(module_name(path), room) for room in TASKS_OF_THEIR_OWN)]
    found = {module_name(path): bare_tasks(tree_of(path)) for path in modules}
    assert not {name: lines for name, lines in found.items() if lines}, "use start_task, or a TaskGroup"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("asyncio.create_task(f())", [1]),
        ("loop = get_running_loop()\nloop.create_task(f())", [2]),
        ("x = [ensure_future(f())]", [1]),
        ("async with asyncio.TaskGroup() as tasks:\n    tasks.create_task(f())", []),
        ("start_task(f())", []),
    ],
)
def test_a_task_that_is_made_elsewhere_is_found(text: str, lines: list[int]) -> None:
    assert bare_tasks(ast.parse(text)) == lines
