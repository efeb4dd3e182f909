"""`diloco-peer run`: what it tells its organiser."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from opendiloco.cli import main
from opendiloco.cli.run import check, next_lines
from opendiloco.config.run_config import RunConfig
from opendiloco.run import Run
from peers.values.identity import Identity
from peers.values.manifest import Invite
from peers.values.wire import PROTOCOL_VERSION

ROOT = Path(__file__).parents[2]

ADDRESS = "/ip4/192.0.2.2/tcp/31337/p2p/12D3KooWQFDaugSZMNNMdfYVGsJjZ11jngwqxJ6678Zmhr2TSQ5o"
STANDARD_LIBRARY = {"source": "stdlib"}


def said(content: dict[str, Any], identity: Path | None = None) -> list[str]:
    """What the organiser of such a run is told to type, without the invite."""
    run = Run.sign(RunConfig.from_manifest_content(content), Identity.generate())
    invite = Invite(run.run_id, (ADDRESS,))
    lines = next_lines(run, invite, Path("run.manifest"), identity)
    return [line.replace(str(invite), "INVITE") for line in lines]


def test_a_run_of_the_standard_library_needs_nothing_else(small_content: dict[str, Any]) -> None:
    assert said(small_content | {"data": STANDARD_LIBRARY})[1:] == ["  diloco-peer join --run INVITE"]


def test_whoever_joins_names_a_folder_for_each_local_source(small_content: dict[str, Any]) -> None:
    """Regression: the command that was shown did not work, since it lacked `--data`."""
    source = small_content["data"]["source"]
    assert said(small_content)[1:] == [
        "  diloco-peer join --run INVITE --data FOLDER",
        f"FOLDER is that machine's own, with the text that is here in {source}.",
    ]
    several = {"sources": [{"source": source, "weight": 1.0}, {"source": "/other", "weight": 1.0}]}
    assert said(small_content | {"data": several})[1:] == [
        "  diloco-peer join --run INVITE --data FOLDER --data FOLDER",
        f"Each FOLDER is that machine's own, with the text that is here in {source}, /other.",
    ]


@pytest.mark.parametrize("identity", [None, Path("organiser.pem")])
def test_a_run_by_invitation_needs_a_ticket(small_content: dict[str, Any], identity: Path | None) -> None:
    content = small_content | {"data": STANDARD_LIBRARY, "admission": {"mode": "invite"}}
    assert said(content, identity)[1:] == [
        "  diloco-peer join --run INVITE --ticket TICKET",
        "Give out such tickets with",
        "  diloco-peer invite create run.manifest" + (" --identity organiser.pem" if identity else ""),
    ]


@pytest.mark.parametrize(
    ("kind", "momentum", "is_warned"), [("sparse", 0.9, True), ("sparse", 0.0, False), ("int8", 0.9, False)]
)
def test_momentum_beside_sparse_payloads_is_warned_of(
    small_content: dict[str, Any], caplog: pytest.LogCaptureFixture, kind: str, momentum: float, is_warned: bool
) -> None:
    outer = {"learning_rate": 1.0, "momentum": momentum}
    check(RunConfig.from_manifest_content(small_content | {"codec": {"kind": kind}, "outer_optimizer": outer}))
    assert ("outer_optimizer.momentum = 0.9 overshoots" in caplog.text) == is_warned


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
    taken = json.loads(done.stdout)
    assert taken["parameters"] > 100_000
    assert {"gpu_memory", "main_memory", "main_memory_on_cpu", "disk", "traffic_each_way"} <= taken.keys()
