"""`diloco-peer run`: what it tells its organiser."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from opendiloco.cli import main
from opendiloco.cli.options import INITIAL_PEERS
from opendiloco.cli.run import _check, _next_lines
from opendiloco.config.overrides import NO_OVERRIDES
from opendiloco.config.run_config import RunConfig
from opendiloco.run import Run
from peers.values.identity import Identity
from peers.values.manifest import Invite, SignedManifest
from peers.values.wire import PROTOCOL_VERSION
from tests.opendiloco.conftest import write_corpus

ROOT = Path(__file__).parents[3]

ADDRESS = "/ip4/192.0.2.2/tcp/31337/p2p/12D3KooWQFDaugSZMNNMdfYVGsJjZ11jngwqxJ6678Zmhr2TSQ5o"
STANDARD_LIBRARY = {"source": "stdlib"}
TO_SEE = ["To see its peers, type on any machine:", "  diloco-peer status --run INVITE --watch"]


def said(content: dict[str, Any], identity: Path | None = None) -> list[str]:
    """What the organiser of such a run is told to type, without the invite."""
    run = Run.sign(RunConfig.from_manifest_content(content), Identity.generate())
    invite = Invite(run.run_id, (ADDRESS,))
    lines = _next_lines(run, invite, Path("run.manifest"), identity)
    return [line.replace(str(invite), "INVITE") for line in lines]


def test_a_run_of_the_standard_library_needs_nothing_else(small_content: dict[str, Any]) -> None:
    assert said(small_content | {"data": STANDARD_LIBRARY})[1:] == ["  diloco-peer join --run INVITE", *TO_SEE]


def test_without_a_node_a_run_says_how_to_start_one() -> None:
    """Regression: only --initial-peer was named, which an organiser without a node cannot give."""
    refused = CliRunner().invoke(main, ["run", "create", "run.toml"], env={INITIAL_PEERS: None})
    assert refused.exit_code == 2
    assert "a new run is announced to a bootstrap node: add --initial-peer" in refused.output
    assert "`diloco-peer bootstrap` starts your own swarm and prints its address" in refused.output
    assert "invite" not in refused.output.partition("Organisers")[0]


def test_whoever_joins_names_a_folder_for_each_local_source(small_content: dict[str, Any]) -> None:
    """Regression: the command that was shown did not work, since it lacked `--data`."""
    source = small_content["data"]["source"]
    assert said(small_content)[1:] == [
        "  diloco-peer join --run INVITE --data FOLDER",
        f"FOLDER is a folder or file, on that machine, with a copy of the text in {source}.",
        *TO_SEE,
    ]
    several = {"sources": [{"source": source, "weight": 1.0}, {"source": "/other", "weight": 1.0}]}
    assert said(small_content | {"data": several})[1:] == [
        "  diloco-peer join --run INVITE --data FOLDER --data FOLDER",
        f"Each FOLDER is a folder or file, on that machine, with a copy of the text in {source}, /other.",
        *TO_SEE,
    ]


@pytest.mark.parametrize("identity", [None, Path("organiser.pem")])
def test_a_run_by_invitation_needs_a_ticket(small_content: dict[str, Any], identity: Path | None) -> None:
    content = small_content | {"data": STANDARD_LIBRARY, "admission": {"mode": "invite"}}
    assert said(content, identity)[1:] == [
        "  diloco-peer join --run INVITE --ticket TICKET",
        "To create tickets, type on this machine:",
        "  diloco-peer invite create run.manifest" + (" --identity organiser.pem" if identity else ""),
        *TO_SEE,
    ]


@pytest.mark.parametrize(
    ("kind", "momentum", "is_warned"), [("sparse", 0.9, True), ("sparse", 0.0, False), ("int8", 0.9, False)]
)
def test_momentum_beside_sparse_payloads_is_warned_of(
    small_content: dict[str, Any], caplog: pytest.LogCaptureFixture, kind: str, momentum: float, is_warned: bool
) -> None:
    outer = {"learning_rate": 1.0, "momentum": momentum}
    _check(RunConfig.from_manifest_content(small_content | {"codec": {"kind": kind}, "outer_optimizer": outer}))
    assert ("outer_optimizer.momentum = 0.9 overshoots" in caplog.text) == is_warned


@pytest.mark.parametrize(
    ("outer_steps", "schedule", "outer_schedule", "warned"),
    [
        (8, {"warmup_steps": 10, "stable_steps": 50, "decay_steps": 20}, None, ""),
        (9, {"warmup_steps": 10, "stable_steps": 50, "decay_steps": 20}, None, "schedule ends after 80 inner steps"),
        (9, {"warmup_steps": 10, "stable_steps": 50, "decay_steps": 20, "final_fraction": 0.1}, None, ""),
        (9, {"kind": "constant", "warmup_steps": 10}, None, ""),
        (9, {"warmup_tokens": 10, "stable_tokens": 50, "decay_tokens": 20}, None, ""),
        (9, {"kind": "constant", "warmup_steps": 10}, {"kind": "cosine", "warmup_steps": 0, "decay_steps": 9}, ""),
        (
            9,
            {"kind": "constant", "warmup_steps": 10},
            {"kind": "cosine", "warmup_steps": 0, "decay_steps": 8},
            "outer_optimizer.schedule ends after 8 outer steps, and the run after 9",
        ),
    ],
)
def test_a_run_that_is_longer_than_a_schedule_is_warned_of(
    small_content: dict[str, Any],
    outer_steps: int,
    schedule: dict[str, Any],
    outer_schedule: dict[str, Any] | None,
    warned: str,
) -> None:
    """Regression: somebody made outer_steps larger, and trained with a learning rate of 0."""
    content = small_content | {"outer_steps": outer_steps, "schedule": schedule}
    content["training"] = small_content["training"] | {"inner_steps": 10}
    content["outer_optimizer"] = {"schedule": outer_schedule}
    said = list(NO_OVERRIDES.beyond_schedules(RunConfig.from_manifest_content(content)))
    assert (len(said), warned in "".join(said)) == (bool(warned), True)


@pytest.mark.parametrize(
    ("outer_steps", "schedule", "outer_schedule", "warned"),
    [
        (7, {"warmup_steps": 10, "stable_steps": 50, "decay_steps": 20}, None, []),
        (
            6,
            {"warmup_steps": 10, "stable_steps": 50, "decay_steps": 20},
            None,
            ["schedule decays only after 60 inner steps, and the run ends after 60"],
        ),
        (6, {"warmup_steps": 10, "stable_steps": 50, "decay_steps": 0}, None, []),
        (6, {"warmup_steps": 10, "stable_steps": 50, "decay_steps": 20, "final_fraction": 1}, None, []),
        (6, {"warmup_tokens": 10, "stable_tokens": 5000, "decay_tokens": 20}, None, []),
        (
            6,
            {"kind": "constant", "warmup_steps": 10},
            {"kind": "cosine", "warmup_steps": 6, "decay_steps": 2},
            ["outer_optimizer.schedule decays only after 6 outer steps, and the run ends after 6"],
        ),
    ],
)
def test_a_run_that_ends_before_a_schedule_decays_is_warned_of(
    small_content: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    outer_steps: int,
    schedule: dict[str, Any],
    outer_schedule: dict[str, Any] | None,
    warned: list[str],
) -> None:
    """Regression: a run ended at the peak learning rate, and neither `run create` nor `run needs` warned of it."""
    content = small_content | {"outer_steps": outer_steps, "schedule": schedule}
    content["training"] = small_content["training"] | {"inner_steps": 10}
    content["outer_optimizer"] = {"schedule": outer_schedule}
    config = RunConfig.from_manifest_content(content)
    assert list(config.undecayed_schedules()) == warned
    _check(config)
    assert all(text in caplog.text for text in warned)
    assert "run amend" in caplog.text or not warned


def test_the_example_is_a_run_that_can_be_created(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["run", "example"])
    assert done.exit_code == 0
    (tmp_path / "run.toml").write_text(done.stdout)
    config = RunConfig.from_toml(tmp_path / "run.toml")
    assert [*NO_OVERRIDES.beyond_schedules(config), *config.undecayed_schedules()] == []
    assert {source.source for source in config.data.all_sources} == {"stdlib"}, "nothing is downloaded"


def test_an_invite_that_leads_only_to_this_machine_says_so(small_content: dict[str, Any]) -> None:
    run = Run.sign(RunConfig.from_manifest_content(small_content | {"data": STANDARD_LIBRARY}), Identity.generate())
    told = {}
    for host in ("127.0.0.1", "192.168.1.2"):
        invite = Invite(run.run_id, (f"/ip4/{host}/tcp/1/p2p/{Identity.generate().peer_id}",))
        told[host] = any(
            "For other machines, create the run" in line for line in _next_lines(run, invite, Path("m"), None)
        )
    assert told == {"127.0.0.1": True, "192.168.1.2": False}


@pytest.mark.parametrize("command", [["create", "--identity", "organiser.pem", "--initial-peer", ADDRESS], ["needs"]])
def test_a_mistake_in_run_toml_is_found_before_anything_slow_is_imported(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opendiloco.model.build", None)  # to import it is an error
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("[data", encoding="utf-8")
    done = CliRunner().invoke(main, ["run", *command, "run.toml"])
    assert done.exit_code == 3
    assert "not valid TOML" in done.stderr


def test_run_needs_warns_of_a_run_that_ends_before_its_decay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opendiloco.model.build", None)  # the warning comes before this slow import
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(re.sub(r"(?m)^outer_steps = .*", "outer_steps = 1", (ROOT / "examples/tiny.toml").read_text()))
    done = CliRunner().invoke(main, ["run", "needs", str(run_toml)])
    assert "WARNING schedule decays only after" in done.stderr


@pytest.fixture
def created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Creates the run of `home/run.toml` from another folder, with an announcement that reaches no network."""

    async def announced(run: Run, initial_peers: tuple[str, ...]) -> tuple[str, ...]:
        return initial_peers

    monkeypatch.setattr("opendiloco.cli.run._announce", announced)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    def create(content: dict[str, Any], *arguments: str) -> Result:
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        monkeypatch.setattr("opendiloco.config.run_config.read_toml", lambda *_: content)
        command = ["run", "create", str(home / "run.toml"), "--initial-peer", ADDRESS, *arguments]
        return CliRunner().invoke(main, command)

    return create


def test_relative_paths_start_at_the_folder_of_run_toml(
    small_content: dict[str, Any], created: Callable[..., Result], tmp_path: Path
) -> None:
    """Regression: they started at the current folder, and a run without text was announced."""
    content = small_content | {"data": small_content["data"] | {"source": "./texts"}}
    missing = created(content)
    assert missing.exit_code == 7
    assert f"there is no {tmp_path / 'home' / 'texts'}" in missing.stderr
    assert not missing.stdout
    assert created(content, "--without-text").exit_code == 0
    write_corpus(tmp_path / "home" / "texts")
    done = created(small_content | {"data": small_content["data"] | {"source": "texts"}})
    assert done.exit_code == 0, done.output
    [manifest] = re.findall(r"^manifest: +(\S+)$", done.stdout, re.MULTILINE)
    config = Run.from_manifest(SignedManifest.unpack(Path(manifest).read_bytes())).config
    assert config.data.source == "./texts"
    assert config.evaluation.digest is not None


def test_warnings_come_once_and_last_and_slow_steps_are_told(
    small_content: dict[str, Any], created: Callable[..., Result]
) -> None:
    """Regression: a schedule that is too short was warned of above all other lines, later twice, and half a minute
    passed without a word."""
    done = created(small_content | {"data": STANDARD_LIBRARY, "outer_steps": 9})
    assert done.exit_code == 0, done.output
    last = done.output.splitlines()[-1]
    assert "WARNING schedule ends after 26 inner steps, and the run after 36" in last
    assert "run amend --outer-steps" in last
    assert done.output.count("schedule ends") == 1
    stages = re.findall(r"INFO +(.*)", done.stderr)
    assert stages == ["checking the model", "reading the text", "announcing the run"]


def test_a_manifest_as_json(small_config: RunConfig, tmp_path: Path) -> None:
    run = Run.sign(small_config, Identity.generate())
    path = tmp_path / "run.manifest"
    path.write_bytes(run.manifest.pack())
    shown = CliRunner().invoke(main, ["run", "show", str(path), "--json"])
    assert shown.exit_code == 0
    assert json.loads(shown.output) == {
        "run": run.run_id,
        "organiser": run.manifest.organiser,
        "protocol_version": PROTOCOL_VERSION,
        "manifest": run.manifest.digest.hex(),
        "content": json.loads(json.dumps(small_config.to_manifest_content())),
    }


def test_what_a_run_takes_as_json() -> None:
    done = CliRunner().invoke(main, ["run", "needs", str(ROOT / "examples" / "tiny.toml"), "--json"])
    assert done.exit_code == 0, done.output
    assert done.stderr.endswith("building the model\n"), "half a minute passed without a word"
    taken = json.loads(done.stdout)
    assert taken["parameters"] > 100_000
    assert {"gpu_memory", "main_memory", "main_memory_on_cpu", "disk", "traffic_each_way"} <= taken.keys()
    assert list(taken["contributions"]) == ["int8", "e2m1"]
    assert taken["contributions"]["int8"] * 2 == taken["traffic_each_way"]
