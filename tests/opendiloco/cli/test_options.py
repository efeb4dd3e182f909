"""Options that several commands share: where the addresses of a swarm come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from opendiloco.cli import main
from opendiloco.cli.bootstrap import bootstrap
from opendiloco.cli.options import INITIAL_PEERS, initial_peers_option, parse_run, refuse_torchrun, run_here, run_option
from opendiloco.config.run_config import RunConfig
from opendiloco.owner import controls
from opendiloco.run import Run
from opendiloco.settings.join_settings import JoinSettings
from peers.network import neighbours
from peers.network.first_contact import FILE_NAME, FORMAT
from peers.values.identity import Identity

OF_INVITE, OF_OPTION, FIRST, SECOND = (
    f"/ip4/192.0.2.{number}/tcp/31337/p2p/{Identity.generate().peer_id}" for number in range(1, 5)
)
VARIABLE = {INITIAL_PEERS: f"{FIRST} {SECOND}"}


@click.command()
@run_option
@initial_peers_option
def show(run: str, initial_peers: tuple[str, ...]) -> None:
    """Print the addresses that a command would ask."""
    click.echo(" ".join(parse_run(run, initial_peers).addresses))


@pytest.mark.parametrize(("here", "said"), [(["a"], "a"), (["a", "a"], "a"), (["a", "b"], None), ([], None)])
def test_the_only_run_that_this_machine_trains_in_needs_no_name(
    here: list[str], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: `status` wanted --run where `pause` found the volunteer by itself."""
    sockets = {Path(f"/state/{run}/{number}/control.sock"): None for number, run in enumerate(here)}
    monkeypatch.setattr("opendiloco.owner.controls.volunteers", lambda state: sockets)
    assert run_here() == said
    monkeypatch.setattr("opendiloco.cli.options.run_here", lambda: said)

    @click.command("show")
    @run_option
    def shown(run: str) -> None:
        click.echo(run)

    done = CliRunner().invoke(shown, [])
    assert (done.output if said else done.exit_code) == (f"{said}\n" if said else 2)


@pytest.fixture
def run_id(small_config: RunConfig) -> str:
    return Run.sign(small_config, Identity.generate()).run_id


def shown(*arguments: str, environment: Mapping[str, str | None] | None = None) -> Result:
    return CliRunner().invoke(show, arguments, env=environment or {INITIAL_PEERS: None})


def test_the_variable_has_the_addresses_where_nothing_else_says_them(run_id: str) -> None:
    assert shown("--run", run_id, environment=VARIABLE).output.split() == [FIRST, SECOND]


def test_the_option_comes_before_the_variable(run_id: str) -> None:
    done = shown("--run", run_id, "--initial-peer", OF_OPTION, environment=VARIABLE)
    assert done.output.split() == [OF_OPTION]


def test_the_invite_comes_before_the_variable_and_beside_the_option(run_id: str) -> None:
    invite = f"diloco:{run_id}@{OF_INVITE}"
    assert shown("--run", invite, environment=VARIABLE).output.split() == [OF_INVITE]
    assert shown("--run", invite, "--initial-peer", OF_OPTION).output.split() == [OF_INVITE, OF_OPTION]


def heard(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Have the local network say this."""

    async def found(run: str) -> tuple[str, ...]:
        return addresses

    monkeypatch.setattr(neighbours, "neighbours", found)


def test_without_any_the_error_says_how_to_get_one(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard(monkeypatch)
    done = shown("--run", run_id, environment={INITIAL_PEERS: None, "XDG_STATE_HOME": "/nowhere"})
    assert done.exit_code == 2
    for way in ("--initial-peer", INITIAL_PEERS, "the invite"):
        assert way in done.stderr


def test_the_local_network_is_asked_last(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard(monkeypatch, SECOND)
    nowhere = {INITIAL_PEERS: None, "XDG_STATE_HOME": "/nowhere"}
    asks = nowhere | {"DILOCO_LOCAL_NETWORK": None}
    assert shown("--run", run_id, environment=asks).stdout.split() == [SECOND]
    assert shown("--run", run_id, "--initial-peer", FIRST, environment=asks).output.split() == [FIRST]
    silent = shown("--run", run_id, environment=nowhere | {"DILOCO_LOCAL_NETWORK": "no"})
    assert silent.exit_code == 2
    assert "looking for the run" not in silent.stderr


def test_a_running_volunteer_is_asked_before_the_local_network(
    run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard(monkeypatch, SECOND)
    socket = tmp_path / "diloco-peer" / run_id / "peer" / controls.NAME
    socket.parent.mkdir(parents=True)
    socket.touch()
    monkeypatch.setattr(
        controls, "ask", lambda path, request: controls.VolunteerStatus(says="", phase="", initial_peers=(FIRST,))
    )
    here = {INITIAL_PEERS: None, "XDG_STATE_HOME": str(tmp_path), "DILOCO_LOCAL_NETWORK": None}
    assert shown("--run", run_id, environment=here).output.split() == [FIRST]


def test_a_node_may_have_a_name(run_id: str) -> None:
    peer = OF_OPTION.rpartition("/")[2]
    done = shown("--run", run_id, "--initial-peer", f"{peer}@node.example.org", "--initial-peer", FIRST)
    assert done.output.split() == [f"/dnsaddr/node.example.org/p2p/{peer}", FIRST]


def test_what_this_machine_remembers_of_the_run_comes_last(run_id: str, tmp_path: Path) -> None:
    peer = OF_OPTION.rpartition("/")[2]
    folder = tmp_path / "diloco-peer" / run_id / "12D3KooWus"
    folder.mkdir(parents=True)
    entry = {"peer": peer, "addresses": [OF_OPTION], "since": 1, "seen": 2}
    known = {"format": FORMAT, "run": run_id, "peers": [entry]}
    (folder / FILE_NAME).write_text(json.dumps(known))
    here: dict[str, str | None] = {INITIAL_PEERS: None, "XDG_STATE_HOME": str(tmp_path)}
    assert shown("--run", run_id, environment=here).output.split() == [OF_OPTION]
    assert shown("--run", run_id, "--initial-peer", FIRST, environment=here).output.split() == [FIRST]


def test_a_bootstrap_node_does_not_look_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable may be about the node itself, the configuration file too."""
    monkeypatch.setenv(INITIAL_PEERS, VARIABLE[INITIAL_PEERS])
    with bootstrap.make_context("bootstrap", ["--identity", "key"]) as context:
        assert context.params["initial_peers"] == ()
    with bootstrap.make_context("bootstrap", ["--identity", "key", "--initial-peer", FIRST]) as context:
        assert context.params["initial_peers"] == (FIRST,)


@pytest.mark.parametrize("command", ["join", "doctor"])
def test_the_help_of_many_settings_has_sections(command: str) -> None:
    lines = CliRunner().invoke(main, [command, "--help"]).output.splitlines()
    titles = [f"{section.TITLE}:" for section in JoinSettings.SECTIONS]
    assert [line for line in lines if line in titles] == titles
    assert lines.index(titles[3]) < next(at for at, line in enumerate(lines) if "--hours" in line)


@pytest.mark.parametrize("command", ["join --run tiny-x", "doctor"])
def test_processes_that_torchrun_has_started_are_no_volunteers(command: str) -> None:
    """Each would be one, on the same GPUs or with a part of them."""
    said = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    done = CliRunner().invoke(main, command.split(), env=said)
    assert done.exit_code == 2
    assert "torchrun has started 2 processes" in done.output
    assert "join` once on each machine, without torchrun" in done.output


def test_one_process_alone_may_be_started_by_whatever_starts_it() -> None:
    refuse_torchrun({"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"})
    refuse_torchrun({"WORLD_SIZE": "2"})  # as Slurm says
    refuse_torchrun({})


@pytest.mark.parametrize("command", ["join", "status", "follow", "run amend --outer-lr 1"])
def test_a_command_without_its_run_says_how_to_find_one(command: str) -> None:
    """Regression: one failed with an unexpected error, and another showed all settings that it had."""
    done = CliRunner().invoke(main, command.split(), env={"DILOCO_RUN": None, "DILOCO_CONFIG": None})
    assert done.exit_code == 2
    assert "Missing option '--run'. Ask its organiser for an invite; `diloco-peer runs`" in done.output


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["run", "create", str(tmp_path)])
    assert done.exit_code == 2
    assert f"File '{tmp_path}' is a directory" in done.output


def test_a_path_that_is_not_there_has_a_remedy() -> None:
    done = CliRunner().invoke(main, ["export", "--run", "tiny-x", "--out", "model", "--data", "/no/such/folder"])
    assert done.exit_code == 2
    assert "Invalid value for '--data': Path '/no/such/folder' does not exist. Give another path." in done.stderr
