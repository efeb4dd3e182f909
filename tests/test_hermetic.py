"""Tests depend on neither the time at which they were imported, nor on what else is in the network."""

from __future__ import annotations

import ast
import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from peers.network import neighbours
from peers.network.links import Links, LinkSettings
from peers.network.throttle import UNLIMITED
from peers.values.identity import Identity
from tests.swarm.cli_processes import LOCAL_NETWORK, Site

HERE = Path(__file__).parent
CLOCKS = {
    "time",
    "time_ns",
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "now",
    "utcnow",
    "today",
    "localtime",
    "gmtime",
}
DEFERRED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is run when a module is imported: not the bodies of functions, but their defaults and decorators."""
    yield node
    for field, value in ast.iter_fields(node):
        if field != "body" or not isinstance(node, DEFERRED):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from run_at_import(child)


def clocks_read(tree: ast.Module) -> list[int]:
    """Return the lines in which an imported module reads a clock."""
    calls = (node for node in run_at_import(tree) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) in CLOCKS]


def test_no_clock_is_read_when_tests_are_imported() -> None:
    """Regression: a ticket that expired 1,000 seconds after the import failed all that came later."""
    found = {path.name: clocks_read(ast.parse(path.read_text(encoding="utf-8"))) for path in HERE.rglob("*.py")}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("import time\nLATER = int(time.time()) + 1000", [2]),
        ("def f(at=time.time()):\n    return time.time()", [1]),
        ("@mark([monotonic()])\ndef f():\n    pass", [1]),
        ("class A:\n    at = datetime.now()\n    def f(self):\n        return time.time()", [2]),
        ("f = lambda: time.time()", []),
    ],
)
def test_the_walk_sees_what_is_run_at_import(text: str, lines: list[int]) -> None:
    assert clocks_read(ast.parse(text)) == lines


def test_the_local_network_is_neither_told_nor_asked_by_tests() -> None:
    async def talk() -> None:
        async with neighbours.announced("peer", "run", []):
            pass

    for work in (talk, lambda: neighbours.neighbours("run")):
        with pytest.raises(AssertionError, match="local network"):
            asyncio.run(work())


def test_the_router_is_not_asked_by_tests() -> None:
    async def listen() -> None:
        async def nothing(*_: object) -> None:
            return None

        links = Links(Identity.generate(), nothing, nothing, nothing, nothing, lambda: (UNLIMITED, UNLIMITED))  # type: ignore[arg-type]
        try:
            links.listen(["0.0.0.0"], LinkSettings())
        finally:
            await links.close()

    with pytest.raises(AssertionError, match="router"):
        asyncio.run(listen())


def test_child_processes_are_told_so_too(tmp_path: Path) -> None:
    assert os.environ[LOCAL_NETWORK] == "no"
    site = Site(tmp_path)
    assert site.environment[LOCAL_NETWORK] == "no"
    for setting in ("yes", None):
        site.environment.pop(LOCAL_NETWORK)
        site.environment |= {LOCAL_NETWORK: setting} if setting else {}
        with pytest.raises(AssertionError, match="local network"):
            site.start("runs")
        site.environment[LOCAL_NETWORK] = "no"
