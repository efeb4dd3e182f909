"""The command line's frame: quick help, one line for each error, one table of exit codes."""

from __future__ import annotations

import atexit
import gc
import io
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import opendiloco
import peers
from opendiloco.cli import group
from opendiloco.cli.group import EXIT_CODES
from opendiloco.errors import DataError
from peers.errors import DilocoPeerError
from peers.values.identity import Identity
from peers.values.wire import PROTOCOL_VERSION

SLOW = {"torch", "hivemind", "transformers", "datasets", "pydantic", "numpy", "rich", "cryptography", "asyncio"}
TINY = str(Path(__file__).parents[3] / "examples" / "tiny.toml")
UNKNOWN = ("--run", "tiny-" + "a" * 32, "--initial-peer", f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}")
COMMANDS = [
    [],
    ["demo"],
    ["doctor"],
    ["bootstrap"],
    ["run"],
    ["run", "create"],
    ["run", "show"],
    ["run", "needs"],
    ["tokenize"],
    ["plan"],
    ["invite"],
    ["invite", "create"],
    ["invite", "list"],
    ["invite", "revoke"],
    ["join"],
    ["pause"],
    ["resume"],
    ["finish"],
    ["status"],
    ["export"],
    ["sample"],
    ["follow"],
    ["log"],
    ["log", "show"],
    ["log", "verify"],
    ["service"],
    ["service", "install"],
    ["identity"],
    ["identity", "show"],
    ["config"],
    ["config", "show"],
]


def test_help_imports_nothing_slow() -> None:
    """Of any command: all are asked in one process, which is to have none of these modules in the end."""
    code = "import sys; from opendiloco.cli import main"
    code += f"\nfor command in {COMMANDS}: main([*command, '--help'], standalone_mode=False)"
    code += "\nprint('modules', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    help_text, _, modules = done.stdout.rpartition("modules ")
    assert help_text.count("Usage: ") == len(COMMANDS), done.stderr
    assert not SLOW & set(modules.split())


@pytest.mark.parametrize("command", [[], ["run"], ["invite"], ["log"]], ids=" ".join)
def test_help_says_in_a_whole_line_what_each_command_does(command: list[str]) -> None:
    """Regression: in a terminal of 80 columns most lines ended in dots."""
    shown = CliRunner().invoke(group.main, [*command, "--help"], terminal_width=80).output
    lines = shown.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert lines
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []


def test_the_version_and_that_of_the_protocol_are_shown() -> None:
    shown = CliRunner().invoke(group.main, ["--version"])
    assert shown.exit_code == 0
    assert shown.output == f"diloco-peer {version('diloco-peer')}, protocol version {PROTOCOL_VERSION}\n"


def test_a_command_ends_without_a_last_collection_of_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: `doctor` ended five seconds after its last line."""
    at_exit: list[object] = []
    monkeypatch.setattr(atexit, "register", lambda function, *arguments: at_exit.append(function))
    CliRunner().invoke(group.main, ["config", "show"])
    assert gc.freeze in at_exit


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_be_told_to_complete(shell: str) -> None:
    script = complete(f"{shell}_source").stdout
    assert "_DILOCO_PEER_COMPLETE" in script


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("diloco-peer jo", "join"), ("diloco-peer join --tick", "--ticket"), ("diloco-peer -", "-h")],
)
def test_commands_and_options_are_completed(typed: str, completed: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    assert f"plain,{completed}" in complete("bash_complete", words).stdout.splitlines()


def test_datasets_draw_no_progress_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: `run create` wrote "Generating train split: 0 examples" between its own lines."""
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "0")  # so that it is as before after the test
    monkeypatch.delenv("HF_DATASETS_DISABLE_PROGRESS_BARS")
    CliRunner().invoke(group.main, ["run", "example"])
    assert os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] == "1"


def complete(instruction: str, words: dict[str, str] | None = None) -> Result:
    """Return what the installed command says to a shell."""
    environment = {"_DILOCO_PEER_COMPLETE": instruction} | (words or {})
    return CliRunner().invoke(group.main, [], prog_name="diloco-peer", env=environment)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["jion"], "No such command 'jion'. Did you mean 'join'?"),
        (["xyzzy"], "No such command 'xyzzy'."),
        (["log", "shwo"], "No such command 'shwo'. Did you mean 'show'?"),
        (["join", "--ticekt", "x"], "'--ticket'"),
        (["--debgu"], "'--debug'"),
    ],
)
def test_what_is_misspelled_is_answered_with_what_is_spelled_alike(typed: list[str], said: str) -> None:
    done = CliRunner().invoke(group.main, typed)
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["run", "create", TINY], ["join"], ["bootstrap"], ["status", *UNKNOWN, "--json", "--watch"], ["train"]],
    ids=lambda arguments: arguments[0],
)
def test_wrong_usage_has_its_exit_code(arguments: list[str]) -> None:
    done = CliRunner().invoke(group.main, arguments)
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(" --help`.")
    assert isinstance(done.exception, SystemExit), "not with a traceback"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("join --upload-limit 20Mbit", "'--upload-limit': '20Mbit' is not a number."),
        ("join --data-port http", "'--data-port': 'http' is not a whole number."),
    ],
)
def test_an_option_that_is_not_a_number_is_refused_in_plain_words(typed: str, said: str) -> None:
    """Regression: "20Mbit" was "not a valid float range"."""
    assert said in CliRunner().invoke(group.main, typed.split()).stderr


@pytest.mark.parametrize("typed", ["join --data", "run create --out", "join --plain=yes"])
def test_an_option_without_its_argument_points_to_its_own_command(typed: str) -> None:
    """Regression: it was sent to the help of `diloco-peer`, which does not have the option."""
    done = CliRunner().invoke(group.main, typed.split(), prog_name="diloco-peer")
    assert done.stderr.endswith(f" See `diloco-peer {typed.partition(' --')[0]} --help`.\n")


def test_a_package_that_is_not_installed_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: where only a bootstrap node was installed, `run needs` called its lack of torch a bug."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "opendiloco.model.build", raising=False)
    done = CliRunner().invoke(group.main, ["run", "needs", TINY])
    assert done.exit_code == 6
    assert "needs the Python package torch, which is not installed" in done.stderr
    assert "bug" not in done.stderr


def test_a_user_without_a_home_is_told_to_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a container's bare user id got a traceback."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    done = CliRunner().invoke(group.main, ["config", "show"])
    assert done.exit_code == 2
    assert "set HOME to a folder" in done.stderr


def test_a_terminal_that_lacks_a_character_shows_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with an ASCII terminal `status` ended with a UnicodeEncodeError."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    group.main(["run", "example"], standalone_mode=False)
    terminal.write("…")
    terminal.flush()
    assert terminal.buffer.getvalue().endswith(b"?")


def test_help_shows_the_exit_codes() -> None:
    out = CliRunner().invoke(group.main, ["--help"]).output
    for code, meaning in EXIT_CODES.items():
        assert f"{code}  {meaning}" in out


def error_classes(base: type[DilocoPeerError] = DilocoPeerError) -> Iterator[type[DilocoPeerError]]:
    yield base
    for derived in base.__subclasses__():
        yield from error_classes(derived)


def test_every_error_has_a_documented_exit_code() -> None:
    for package in (opendiloco, peers):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if module.name.endswith("errors"):
                import_module(module.name)
    codes = {error.exit_code for error in error_classes() if error.__module__.split(".")[0] in ("opendiloco", "peers")}
    assert codes <= set(EXIT_CODES)
    assert {0, 130} <= set(EXIT_CODES) - codes  # these are no errors of ours


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch, *options: str) -> Result:
    """Run a command that raises."""

    @click.command()
    def command() -> None:
        raise error

    monkeypatch.setattr(group._Commands, "get_command", lambda self, context, name: command)
    return CliRunner().invoke(group.main, [*options, "join"])


def test_an_expected_error_is_its_message_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    result = fail_with(DataError("No text.", "Write some."), monkeypatch)
    assert result.exit_code == 7
    assert result.stderr == "error: No text. Write some.\n"
    assert result.stdout == ""


@pytest.mark.parametrize("kind", [DataError, ValueError])
def test_an_error_does_not_rewrite_a_terminal(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words may be a stranger's."""
    assert fail_with(kind("a\x1b[2J\x07b"), monkeypatch).stderr.removesuffix("\n").isprintable()


def test_an_unexpected_error_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ExceptionGroup("tasks", [ZeroDivisionError("division\nby zero")])
    result = fail_with(error, monkeypatch)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: unexpected ZeroDivisionError: division by zero. This is a bug: ")
    assert result.stderr.count("\n") == 1
    assert "--debug" in result.stderr


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    result = fail_with(DataError("No text."), monkeypatch, "--debug")
    assert result.exit_code == 7
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.endswith("error: No text.\n")


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fail_with(KeyboardInterrupt(), monkeypatch).exit_code == 130
