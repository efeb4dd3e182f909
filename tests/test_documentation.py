"""What README, docs and docker/ say is what there is."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
import yaml  # type: ignore[import-untyped]

from opendiloco.cli import main
from opendiloco.cli.bootstrap import DATA_PORT, LIBP2P_PORT
from opendiloco.cli.group import EXIT_CODES
from opendiloco.config.run_config import RunConfig
from peers.messages.messages import KINDS
from peers.protocol.diagrams import PARTS, diagram
from peers.protocol.state_machine import StateMachine
from tests.documents import DOCUMENTS, ROOT, blocks, commands

README, RUNS, ARCHITECTURE, PROTOCOL = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/runs.md", "docs/architecture.md", "docs/protocol.md")
)
DOCKERFILES = sorted(ROOT.glob("docker/*Dockerfile*"))
VOLUNTEER = (ROOT / "docs" / "volunteer.md").read_text(encoding="utf-8")
REMEDIES = VOLUNTEER.split("## Errors and remedies")[1].split("\n## ")[0]
NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
COMPOSE = ROOT / "docker" / "compose.yaml"
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)[^)]*\)")
ADDRESS = "/ip4/192.0.2.2/tcp/31337/p2p/12D3KooWADA2vJXLmyk1SHLyFogztmUkYfacm9C2finbispzbjcL"
# Prints the distributions of everything that a bootstrap node has imported by the time that it runs.
BOOTSTRAP_IMPORTS = f"""
import sys
from importlib.metadata import distribution, packages_distributions
before = set(sys.modules)
import ast, importlib, opendiloco.storage.writer, opendiloco.cli.bootstrap
with open(opendiloco.cli.bootstrap.__file__) as source:  # what the command imports only when it runs, too
    for node in ast.walk(ast.parse(source.read())):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("opendiloco", "peers"):
            importlib.import_module(node.module)
from peers.network.daemon import parse_addresses
parse_addresses([{ADDRESS!r}], needs_peer_id=True)
parse_addresses(["/dns4/bootstrap/tcp/31337", "/ip6/::1/udp/31337/quic"], needs_peer_id=False)
owners = packages_distributions()
new = set(sys.modules) - before
files = {{getattr(sys.modules[name], "__file__", None) for name in new}}
possible = {{owner for name in new for owner in owners.get(name.split(".")[0], [])}}
# Several share a name such as `google`.
print(*sorted(one for one in possible if files & {{str(path.locate()) for path in distribution(one).files or ()}}))
"""


def assert_is_a_command(arguments: list[str]) -> None:
    """Parse a command line as the program does, without running it."""
    command: click.Command = main
    rest = arguments
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(click.Context(command), rest[0])
        assert found is not None, f"there is no command {rest[0]!r} in {shlex.join(arguments)}"
        command, rest = found, rest[1:]
    try:
        with suppress(click.exceptions.Exit):  # --help
            command.make_context("diloco-peer", list(rest))
    except click.UsageError as error:
        pytest.fail(f"diloco-peer {shlex.join(arguments)}: {error.format_message()}")


def tree() -> Iterator[str]:
    """Yield the paths in the tree of docs/architecture.md: two spaces a level, folders end in a slash."""
    folders: list[str] = []
    for line in "".join(blocks(ARCHITECTURE, "")).splitlines():
        indentation, name = re.match(r"( *)(\S+)", line).groups()  # type: ignore[union-attr]
        folders = folders[: len(indentation) // 2]
        yield "/".join([*folders, name.rstrip("/")])
        if name.endswith("/"):
            folders.append(name.rstrip("/"))


def pins(path: Path) -> dict[str, str]:
    """Names, as package indexes compare them, and pinned versions."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines)}


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    return found


# README and docs ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = [target for target in LINK.findall(document.read_text(encoding="utf-8")) if "://" not in target]
    assert not [target for target in targets if not (document.parent / target).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_prose_fits_the_line(document: Path) -> None:
    lines = document.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]
    assert not [line for line in lines if line.startswith(("<<<<<<<", ">>>>>>>"))], "a merge is not finished"


def test_tree_names_what_is_there() -> None:
    paths = list(tree())
    rooms = {f"{path.parent.parent.name}/{path.parent.name}" for path in ROOT.glob("*/*/__init__.py")}
    assert {room for room in rooms if room.startswith(("peers/", "opendiloco/"))} <= set(paths)
    assert {"native/check", "Makefile"} <= set(paths)
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_reading_list_counts_the_lines_of_its_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\S+)\]\(\1\) \| (\d+) \|", text, re.MULTILINE)
    lines = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name, _ in rows}
    assert len(rows) == 7
    assert not [name for name, count in rows if not 0.8 < lines[name] / int(count) < 1.2]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_can_be_typed(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FOLDER").mkdir()  # options that name a folder want it to be there
    for arguments in commands(document.read_text(encoding="utf-8")):
        assert_is_a_command(arguments)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    used = {name for document in DOCUMENTS for name in re.findall(r"\bmake ([a-z]+)", document.read_text())}
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    assert {"demo", "test"} <= used & targets
    assert not {name for block in blocks(README, "sh") for name in re.findall(r"^make ([a-z]+)", block, re.M)} - targets


def test_manifest_in_the_page_on_runs_belongs_to_a_run(tmp_path: Path) -> None:
    """It leaves out the model, which the example has."""
    [shown] = blocks(RUNS, "toml")
    example = (ROOT / "examples" / "tiny.toml").read_text(encoding="utf-8")
    model = example[example.index("[model.config]") : example.index("[data]")]
    path = tmp_path / "run.toml"
    path.write_text(shown + model, encoding="utf-8")
    assert RunConfig.from_toml(path).name == "tiny"


def test_the_readme_is_short_and_every_page_is_in_the_navigation() -> None:
    assert len(README.splitlines()) <= 90
    pages = {page.name for page in ROOT.glob("docs/*.md")}
    navigation = set(re.findall(r"\b[\w-]+\.md$", NAVIGATION, re.MULTILINE))
    assert pages == navigation
    assert {"docs/volunteer.md", "docs/commands.md"} <= set(LINK.findall(README))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the built site."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: `make venv` does that")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_every_page(site: Path) -> None:
    pages = {page.stem for page in ROOT.glob("docs/*.md")}
    assert pages <= {page.stem for page in site.glob("*.html")}
    assert not list(site.glob("*.py"))


def test_the_site_asks_nobody_else_for_anything(site: Path) -> None:
    loaded = re.compile(r"<(?:script|img|iframe)\b[^>]*\bsrc=\"([^\"]+)|<link\b[^>]*\bhref=\"([^\"]+)")
    styles = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)")
    for page in site.glob("*.html"):
        found = [script or style for script, style in loaded.findall(page.read_text(encoding="utf-8"))]
        assert not [address for address in found if re.match(r"(\w+:)?//", address)], page.name
    for style in site.rglob("*.css"):
        assert not styles.findall(style.read_text(encoding="utf-8")), style.name


def test_links_in_the_site_lead_somewhere(site: Path) -> None:
    for page in set(site.glob("*.html")) - {site / "404.html"}:  # whose links begin at the site's root
        targets = re.findall(r"<a\b[^>]*\bhref=\"([^\"#]+)", page.read_text(encoding="utf-8"))
        near = [target for target in targets if "://" not in target]
        assert not [target for target in near if not (page.parent / target).exists()], page.name


def texts(path: Path) -> Iterator[str]:
    """Yield the texts in a module, with `…` where one has a value."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_errors_that_are_explained_are_those_of_the_program() -> None:
    modules = [path for package in ("opendiloco", "peers") for path in (ROOT / package).rglob("*.py")]
    known = {text for path in modules for text in texts(path)}
    explained = re.findall(r"^### `(.*)`$", REMEDIES, re.MULTILINE)
    assert explained
    assert not [error for error in explained if not any(text.startswith(error.rstrip("…")) for text in known)]


def test_exit_codes_beside_errors_are_those_of_the_program() -> None:
    shown = {int(code) for code in re.findall(r"[(, ](\d+)(?=[,)])", REMEDIES)}
    assert shown
    assert shown <= set(EXIT_CODES)


def test_every_message_is_in_the_page_on_the_protocol() -> None:
    rows = re.findall(r"^\| ([A-Z]\w+) \|", PROTOCOL, re.MULTILINE)
    assert {kind.__name__ for kind in KINDS.values()} <= set(rows)


# Docker -------------------------------------------------------------------------------------------------------------
def test_compose_has_a_bootstrap_node_and_two_volunteers(services: dict[str, Any]) -> None:
    assert {"bootstrap", "volunteer-1", "volunteer-2"} <= services.keys()


def test_compose_builds_our_dockerfiles(services: dict[str, Any]) -> None:
    builds = [service["build"] for service in services.values() if "build" in service]
    assert {(COMPOSE.parent / build["context"]).resolve() for build in builds} == {ROOT.resolve()}
    assert {ROOT / build["dockerfile"] for build in builds} == set(DOCKERFILES)


def test_compose_keeps_what_is_in_data(services: dict[str, Any]) -> None:
    volumes = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["volumes"]
    ours = [service for service in services.values() if "build" in service]
    mounts = [mount.split(":") for service in ours for mount in service["volumes"]]
    kept = sorted(name for name, where, *_ in mounts if where == "/data")
    assert kept == sorted(volumes.keys() - {"prometheus", "grafana"})
    assert len(kept) == len(ours)


def test_compose_commands_can_be_typed(services: dict[str, Any]) -> None:
    for name in ("bootstrap", "volunteer-1", "volunteer-2", "volunteer-gpu"):
        typed = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", each) for each in services[name]["command"]]  # the defaults
        assert_is_a_command(typed)


def test_compose_publishes_what_others_dial(services: dict[str, Any]) -> None:
    """Regression: a bootstrap node for the world published no port."""
    published = [port.rpartition(":")[2] for port in services["bootstrap"]["ports"]]
    assert published == [str(LIBP2P_PORT), str(DATA_PORT), "8080"]
    assert "--dashboard=0.0.0.0:8080" in services["bootstrap"]["command"]
    assert any("ANNOUNCE" in each for each in services["bootstrap"]["command"])


def test_compose_gives_gpus_to_the_volunteer_whose_torch_has_cuda(services: dict[str, Any]) -> None:
    reserved = {name: service["deploy"] for name, service in services.items() if "deploy" in service}
    [device] = reserved.pop("volunteer-gpu")["resources"]["reservations"]["devices"]
    assert (device["capabilities"], device["count"], reserved) == (["gpu"], "all", {})
    with_cuda = {name for name, one in services.items() if one.get("build", {}).get("args", {}).get("CUDA")}
    assert with_cuda == {"volunteer-gpu"}
    assert services["volunteer-gpu"]["image"] != services["volunteer-1"]["image"]


def test_compose_mounts_files_that_are_there(services: dict[str, Any]) -> None:
    mounts = [mount.split(":")[0] for service in services.values() for mount in service["volumes"]]
    folders = [COMPOSE.parent / mount for mount in mounts if mount.startswith(".")]
    assert len(folders) == 4
    assert not [folder for folder in folders if not folder.exists()]


def test_compose_has_prometheus_scrape_what_serves_metrics(services: dict[str, Any]) -> None:
    config = yaml.safe_load((COMPOSE.parent / "prometheus" / "compose.yml").read_text(encoding="utf-8"))
    [job] = config["scrape_configs"]
    [targets] = [static["targets"] for static in job["static_configs"]]
    assert set(targets) == {f"{name}:31339" for name in ("bootstrap", "volunteer-1", "volunteer-2")}
    assert [(found["names"], found["port"]) for found in job["dns_sd_configs"]] == [(["volunteer-gpu"], 31339)]
    assert {"--metrics-port=31339", "--metrics-host=0.0.0.0"} <= set(services["bootstrap"]["command"])
    for name in ("volunteer-1", "volunteer-2", "volunteer-gpu"):
        assert services[name]["environment"]["DILOCO_METRICS_HOST"] == "0.0.0.0"
        assert services[name]["shm_size"] == "4g"


def test_grafana_gets_the_dashboard_and_its_data_source(services: dict[str, Any]) -> None:
    folder = COMPOSE.parent / "grafana" / "provisioning"
    [source] = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((folder / "dashboards" / "diloco-peer.yaml").read_text())["providers"]
    mounted = [mount.split(":")[1] for mount in services["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/dashboard.json" in mounted


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_ask_for_their_health(dockerfile: Path) -> None:
    [check] = re.findall(r"^HEALTHCHECK .*\\\n +CMD (.*)$", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
    program, option, code = yaml.safe_load(check)
    assert (program, option) == ("python", "-c")
    compile(code, str(dockerfile), "exec")
    assert "/healthz" in code


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_start_a_command_as_an_ordinary_user(dockerfile: Path) -> None:
    lines = dockerfile.read_text(encoding="utf-8").splitlines()
    values = dict(line.split(maxsplit=1) for line in lines if re.match(r"(USER|ENTRYPOINT|CMD) ", line))
    assert values["ENTRYPOINT"] == '["diloco-peer"]'
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", values["USER"])
    assert_is_a_command(yaml.safe_load(values["CMD"]))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_get_what_they_copy(dockerfile: Path) -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(\S+) (?!\.$)", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
    needed = {"README.md", "LICENSE", "MANIFEST.in", "setup.cfg", "setup.py", "pyproject.toml", "constraints.txt"}
    assert needed | {"native", "opendiloco", "peers", *copied} <= allowed
    assert not [name for name in allowed if not (ROOT / name).exists()]


def test_the_volunteers_image_imports_what_is_there() -> None:
    """Regression: it named a module that had moved, and could not be built."""
    dockerfile = (ROOT / "docker" / "volunteer.Dockerfile").read_text(encoding="utf-8")
    named = re.findall(r"\b(?:opendiloco|peers)(?:\.\w+)+", dockerfile)
    assert named
    assert not [name for name in named if find_spec(name) is None]


def test_bootstrap_image_has_the_pinned_versions_and_no_torch() -> None:
    bootstrap, constraints = (pins(ROOT / name) for name in ("docker/bootstrap-requirements.txt", "constraints.txt"))
    assert "hivemind" in bootstrap
    assert not {"torch", "transformers", "datasets"} & bootstrap.keys()
    assert {name: constraints[name] for name in bootstrap.keys() & constraints.keys()}.items() <= bootstrap.items()


def test_bootstrap_image_has_all_that_a_bootstrap_node_imports() -> None:
    command = [sys.executable, "-c", BOOTSTRAP_IMPORTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = {normal(name) for name in done.stdout.split()} - {"diloco-peer"}
    assert {"hivemind", "idna", "netaddr"} <= imported
    assert imported <= pins(ROOT / "docker" / "bootstrap-requirements.txt").keys()


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_diagrams_are_those_of_the_tables(part: type[StateMachine]) -> None:
    assert f"```mermaid\n{diagram(part)}\n```" in ARCHITECTURE


def test_what_holds_a_sentence_about_security_is_there() -> None:
    """The page names tests beside its promises; `::test_…` is one of the file before it."""
    named = re.findall(r"`([\w/]+\.py)?::(test_\w+)`", (ROOT / "docs" / "security.md").read_text(encoding="utf-8"))
    assert len(named) > 30
    file = ""
    for path, name in named:
        file = path or file
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"
