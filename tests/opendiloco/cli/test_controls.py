"""Which volunteers `pause`, `resume` and `finish` mean, where several run on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from opendiloco.cli import main
from opendiloco.owner import controls
from opendiloco.owner.controls import VolunteerStatus
from peers.errors import ManifestError

RUN = "tiny-" + "a" * 32


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of two volunteers in one run, which answer."""
    for peer in ("12D3KooWaaaaaaaa", "12D3KooWbbbbbbbb"):
        (tmp_path / RUN / peer).mkdir(parents=True)
        (tmp_path / RUN / peer / controls.NAME).touch()
    monkeypatch.setattr(
        controls, "ask", lambda path, request: VolunteerStatus(says="pausing", phase="training", reasons=())
    )
    return tmp_path


def pause(state: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["pause", "--state", str(state), *options])


@pytest.mark.parametrize(
    "command", [["status"], ["sample", "Once"], ["export", "--out", "model"], ["follow", "--until", "1"]]
)
def test_commands_take_the_run_that_this_machine_is_in(
    command: list[str], state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(state)
    monkeypatch.setattr("opendiloco.storage.run_folder.default_state_folder", lambda: state)
    asked = list[str]()

    def refuse(run: str, *_: object) -> None:
        asked.append(run)
        raise ManifestError("seen.")

    for module in ("status", "export", "follow"):
        monkeypatch.setattr(f"opendiloco.cli.{module}.parse_run", refuse)
    assert CliRunner().invoke(main, command).exit_code == 3
    assert asked == [RUN]
    monkeypatch.setattr(controls, "ask", lambda path, request: None)
    refused = CliRunner().invoke(main, command)
    assert refused.exit_code == 2
    assert "--run" in refused.output


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["no run"], 3, "'no run' is not a run id"),
        (["--run", "no run"], 3, "'no run' is not a run id"),
        (["no run", "--run", RUN], 2, "the run is named twice: leave out --run"),
        ([], 2, "Missing option '--run'"),
        (["--run", "--identity", "x"], 2, "--run has no invite after it: if you gave a variable, it is empty"),
        (["--run"], 2, "--run has no invite after it: if you gave a variable, it is empty"),
        (["--run", ""], 2, "--run has no invite after it: if you gave a variable, it is empty"),
        ([""], 2, "INVITE is empty: give the invite; if you gave a variable, it is empty"),
        (["--run", RUN, "--until", "2001-01-01 07:30"], 2, "'2001-01-01 07:30' is in the past"),
    ],
)
def test_join_takes_the_run_as_its_first_word(arguments: list[str], code: int, said: str) -> None:
    refused = CliRunner().invoke(main, ["join", *arguments])
    assert (refused.exit_code, said in refused.output) == (code, True), refused.output


COMMANDS = "export", "sample", "log show", "log verify", "run amend", "pause", "resume", "finish", "config show"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("left", [["--run", "--help"], ["--run", ""], ["--run="]])
def test_an_empty_invite_is_no_run(command: str, left: list[str]) -> None:
    """Regression: `export --run $INVITE --to model` took "--to" as the run, and `pause --run ""` called it misspelt."""
    refused = CliRunner().invoke(main, [*command.split(), *left])
    assert (refused.exit_code, "if you gave a variable, it is empty" in refused.output) == (2, True), refused.output


def test_the_shell_completes_an_unfinished_command_line() -> None:
    """Regression: the check of --run ended the completion with an error."""
    for command, typed in (("join", ["--run"]), ("export", ["--run", "--at"])):
        shell = ShellComplete(main, {}, "diloco-peer", "COMPLETE")
        assert shell.get_completions([command, *typed], "") is not None


def test_two_volunteers_in_one_run_are_told_apart_by_their_peer_ids(state: Path) -> None:
    """Regression: it said to choose with --run, which names both."""
    refused = pause(state, "--run", RUN)
    assert refused.exit_code == 6
    assert f"{RUN} (…aaaaaaaa), {RUN} (…bbbbbbbb). Choose with --run or --peer, or give --all." in refused.output
    absent = pause(state, "--peer", "zzz")
    assert absent.exit_code == 6
    assert "no volunteer zzz in" in absent.output
    assert f"These are running: {RUN} (…aaaaaaaa), {RUN} (…bbbbbbbb)." in absent.output
    assert pause(state, "--peer", "…bbbbbbbb").output == f"{RUN} (…bbbbbbbb): pausing\n"
    assert pause(state, "--all").output.count("pausing") == 2
    assert "no volunteer cccc" in pause(state, "--peer", "cccc").output
