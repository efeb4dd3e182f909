"""Who may import whom: cli → opendiloco → peers, with each outside world behind one door."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for package in ("opendiloco", "peers") for path in (ROOT / package).rglob("*.py"))
LINES_AT_MOST = 700


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Of a file that most tests here ask about, so it is parsed once."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(path: Path) -> Iterator[str]:
    """The absolute names of all that a file imports, in functions and under TYPE_CHECKING too.

    `from a import b` yields `a.b`: whether b is a module or not makes no difference to the rules below.
    """
    package = path.relative_to(ROOT).parent.parts
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@cache
def importers(imported: str) -> frozenset[str]:
    """The modules that import a package or anything in it, other than that package's own."""
    return frozenset(
        module_name(path)
        for path in SOURCES
        if not is_in(module_name(path), imported) and any(is_in(name, imported) for name in imports(path))
    )


def test_the_walk_sees_every_kind_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    path = tmp_path / "opendiloco" / "cli" / "join.py"
    path.parent.mkdir(parents=True)
    path.write_text("import a.b\nfrom c import d\ndef f():\n    from . import e\n    from ..g import h\n")
    assert list(imports(path)) == ["a.b", "c.d", "opendiloco.cli.e", "opendiloco.g.h"]


def test_there_is_something_to_check() -> None:
    assert {"opendiloco.kernels.__main__", "peers.errors"} <= {module_name(path) for path in SOURCES}


@pytest.mark.parametrize("imported", ["opendiloco", "tests", "torch", "transformers", "datasets"])
def test_peers_knows_nothing_of_training(imported: str) -> None:
    assert not {module for module in importers(imported) if is_in(module, "peers")}


def test_hivemind_is_behind_the_transport() -> None:
    assert importers("hivemind") <= {"peers.network.transport", "peers.network.hivemind_lite"}


IMPORTS: dict[str, set[str]] = {
    "values": set(),
    "log": {"values"},
    "presence": {"values", "log"},
    "messages": {"values", "log", "presence"},
    "audit": {"values", "log", "messages"},
    "protocol": {"values", "log", "presence", "messages", "audit"},
    "network": {"values", "presence"},
    "transfer": {"values", "log", "presence", "messages", "protocol", "network"},
    "driver": {"values", "log", "presence", "messages", "audit", "protocol", "network", "transfer"},
}
"""The rooms of peers, as docs/architecture.md draws them. All of them may import errors."""
COUNTING = {"network", "driver"}
"""Rooms that count for Prometheus, and say how they are."""
PURE = (
    "presence",
    "messages",
    "audit",
    "protocol",
    "log.header",
    "log.lineage",
    "log.settings",
    "log.state",
    "values.wire",
)
"""What is the same in the simulator and on a real network."""
INPUT_AND_OUTPUT = ("asyncio", "io", "os", "pathlib", "random", "socket", "subprocess", "threading", "time")


def modules_of(room: str) -> list[Path]:
    return [path for path in SOURCES if is_in(module_name(path), f"peers.{room}")]


@pytest.mark.parametrize("room", IMPORTS)
def test_rooms_of_peers_import_as_drawn(room: str) -> None:
    ours = {name.split(".")[1] for path in modules_of(room) for name in imports(path) if is_in(name, "peers")}
    assert ours - {room, "errors"} - ({"metrics"} if room in COUNTING else set()) == IMPORTS[room]


def test_every_room_of_peers_is_in_the_table() -> None:
    rooms = {path.parent.name for path in (ROOT / "peers").glob("*/__init__.py")}
    assert rooms == set(IMPORTS)
    for room, others in IMPORTS.items():
        assert others <= set(list(IMPORTS)[: list(IMPORTS).index(room)]), "in the order of floors"


@pytest.mark.parametrize("name", PURE)
def test_the_protocol_has_no_input_or_output(name: str) -> None:
    """So that a simulated clock and network run the very code that is deployed."""
    modules = modules_of(name)
    imported = [name for path in modules for name in imports(path)]
    assert modules
    assert not {other for other in imported for module in INPUT_AND_OUTPUT if is_in(other, module)}
    assert not {"peers.log.folder", "peers.transfer.storage", "peers.values.system"} & {
        other.rpartition(".")[0] for other in imported
    }


def imported_of_rooms() -> dict[str, dict[str, set[str]]]:
    """Return what other rooms import of each: names by its modules, "" for the room itself."""
    names = {".".join(module_name(path).split(".")[:2]) for path in SOURCES if len(path.relative_to(ROOT).parts) > 2}
    rooms = {room: dict[str, set[str]]() for room in sorted(names)}
    for path in SOURCES:
        for name in imports(path):
            room = ".".join(name.split(".")[:2])
            if room in rooms and name != room and not is_in(module_name(path), room):
                module, _, imported = name.removeprefix(f"{room}.").rpartition(".")
                rooms[room].setdefault(module, set()).add(imported)
    return rooms


def named_public(room: str) -> dict[str, set[str]]:
    """Return the names that a room's docstring has for others; see `imported_of_rooms`."""
    docstring = ast.get_docstring(ast.parse((ROOT / room.replace(".", "/") / "__init__.py").read_text("utf-8"))) or ""
    lines = docstring.partition("Other rooms import:\n")[2].replace("\n    ", " ").splitlines()
    return {
        module.replace("the room", ""): set(names.split(", ")) for module, names in (line.split(": ") for line in lines)
    }


@pytest.mark.parametrize("room", imported_of_rooms())
def test_a_room_names_what_others_import_of_it(room: str) -> None:
    """In its docstring: to import it all takes seconds. What it does not name may change with the room alone."""
    assert named_public(room) == imported_of_rooms()[room]


def test_remote_storage_is_behind_one_module() -> None:
    assert importers("fsspec") == {"opendiloco.storage.remote"}


def test_the_web_server_is_behind_one_room() -> None:
    assert {module.rpartition(".")[0] for module in importers("aiohttp")} == {"opendiloco.dashboard"}


def test_compiled_kernels_are_behind_their_wrapper() -> None:
    assert importers("opendiloco._kernels") == {"opendiloco.kernels"}


ROOMS = (
    "kernels",
    "config",
    "data",
    "model",
    "training",
    "workers",
    "storage",
    "owner",
    "settings",
    "view",
    "volunteer",
    "library",
    "dashboard",
    "tools",
    "cli",
)
"""Packages of opendiloco, as the tree in docs/architecture.md has them."""


def test_every_room_is_in_the_tree() -> None:
    assert {path.parent.name for path in (ROOT / "opendiloco").glob("*/__init__.py")} == set(ROOMS)
    tree = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("\nopendiloco/\n")[2]
    assert tuple(re.findall(r"^  (\w+)/", tree.partition("\nnative/")[0], re.MULTILINE)) == ROOMS


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_from_those_above(room: str) -> None:
    above = {f"opendiloco.{other}" for other in ROOMS[: ROOMS.index(room)]}
    assert not {module for module in importers(f"opendiloco.{room}") if any(is_in(module, other) for other in above)}


FOUNDATIONS = {
    "alignment",
    "child_processes",
    "cores",
    "errors",
    "evaluation_turns",
    "gpus",
    "host_memory",
    "quantities",
    "run",
    "shared_memory",
    "stages",
}
"""Modules of opendiloco outside the rooms that a room may import; the others stand on the rooms."""


@pytest.mark.parametrize("room", ROOMS[: ROOMS.index("volunteer")])
def test_rooms_import_nothing_that_stands_on_them(room: str) -> None:
    outside = {path.stem for path in (ROOT / "opendiloco").glob("*.py")} - FOUNDATIONS - {"__init__"}
    found = {
        (imported, module)
        for imported in outside
        for module in importers(f"opendiloco.{imported}")
        if is_in(module, f"opendiloco.{room}")
    }
    assert not found


@pytest.mark.parametrize("imported", ["torch", "hivemind"])
def test_the_view_needs_no_hivemind_and_no_torch(imported: str) -> None:
    assert not {module for module in importers(imported) if is_in(module, "opendiloco.view")}


def test_nothing_imports_the_build_script() -> None:
    assert not importers("native")


@pytest.mark.parametrize("imported", ["opendiloco.cli", "click"])
def test_the_command_line_is_on_top(imported: str) -> None:
    assert not {module for module in importers(imported) if not is_in(module, "opendiloco.cli")}


def test_folders_are_made_private() -> None:
    """With `mkdir` the umask has a say, as is right only where a user names a folder for something to give away."""
    calls = {
        (module_name(path), node.func.attr)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    makers = {module for module, name in calls if name in ("mkdir", "makedirs")}
    given_away = {
        "opendiloco.cli.follow",
        "opendiloco.cli.run",
        "opendiloco.data.token_files",
        "opendiloco.model.export",
    }
    remote = {"opendiloco.storage.remote"}  # whose `makedirs` are those of a store that is not on this machine
    assert makers - given_away - remote == {"peers.values.system"}


def test_modules_stay_small() -> None:
    lines = {module_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    too_long = {name: count for name, count in lines.items() if count > LINES_AT_MOST}
    assert not too_long, "split them by responsibility"
