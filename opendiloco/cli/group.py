"""The command group `diloco-peer`, which loads each command from its module, and turns errors into one line and an exit
code."""

from __future__ import annotations

import atexit
import gc
import io
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import FILE_KEY, PATH_KEY, log_options
from opendiloco.errors import MachineError, SettingsError, fit_for_terminal
from opendiloco.settings.join_settings import default_settings_path, read_settings_file
from peers.errors import DilocoPeerError

EXIT_CODES = {
    0: "success, or a polite leave",
    1: "unexpected error, a bug; or a failed `demo`: peers disagree, the model did not learn, or it was too short",
    2: "wrong usage: an option, argument, environment variable, configuration file or identity file",
    3: "wrong manifest, invite, run id, run.toml or links.toml; or an amendment that this version does not understand",
    4: "swarm out of reach: no bootstrap node answers, the run is unknown, or the run has no live peer",
    5: "local network problem: an address, or libp2p's daemon",
    6: "unsuitable machine: memory, disk, torch or a device; a folder that is not empty; several volunteers here",
    7: "training text missing, unreadable or too small, or local files not named with --data, --model or --tokenizer",
    8: "training failed: a worker died too often, a GPU failed, or a loss or weight is not finite",
    9: "checkpoint missing, damaged, or of another run",
    10: "remote folder unusable: its URL, the package for it, or its credentials",
    11: "log damaged: headers, payloads or states do not match their digests",
    12: "wrong state: a peer that `follow` watches, or this machine, has another state than the log leads to",
    13: "not admitted to a run by invitation: the ticket is missing, expired or revoked",
    14: "another machine takes part with the same key: a copied identity file",
    15: "a port, identity file or archive is in use by another program on this machine",
    16: "`doctor` found a problem that keeps this machine from training or from joining the run",
    70: "protocol broken: a bug in diloco-peer or in a peer",
    130: "left at once: after a second Ctrl-C, or after the first when there is nothing to finish",
}
"""Exit codes and their meaning, as `diloco-peer --help` and docs/commands.md show them."""
UNEXPECTED, UNFIT, INTERRUPTED = 1, 16, 130  # exit codes set by the command line itself, not by a DilocoPeerError

COMMANDS = {
    "demo": "machine:demo",
    "doctor": "machine:doctor",
    "bootstrap": "bootstrap:bootstrap",
    "run": "run:run_group",
    "runs": "status:runs",
    "plan": "run:plan",
    "tokenize": "run:tokenize",
    "invite": "invite:invite_group",
    "join": "join:join",
    "pause": "join:pause",
    "resume": "join:resume",
    "finish": "join:finish",
    "status": "status:status",
    "export": "export:export",
    "sample": "export:sample",
    "follow": "follow:follow",
    "log": "log:log_group",
    "service": "machine:service_group",
    "identity": "machine:identity_group",
    "config": "machine:config_group",
}
"""Module and function of each command, in the order of `--help`."""

LOG_LEVELS = {"bootstrap": "info", "run": "info", "tokenize": "info", "follow": "info", "doctor": "error"}
"""Default log level of a command; 'warning' for the others."""
START_NO_LOG = {"join", "pause", "resume", "finish", "service", "config", "identity"}
"""Commands that do not start to log at once: `join` sets up its screen first, and the others never write a log."""

FIRST_STEPS = (
    ("diloco-peer demo", "Watch a swarm train on this machine for three minutes."),
    ("diloco-peer doctor", "Find out whether this machine can train."),
    ("diloco-peer join --run INVITE", "Train in a run. Its organiser gives out the invite."),
    ("diloco-peer bootstrap", "Run the node through which the peers of your own run find each other."),
)
HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True}


class _WrongUsage(click.ClickException):
    """A usage error as one line, like other errors, with the command's help as the remedy."""

    exit_code = 2

    def __init__(self, error: click.UsageError) -> None:
        what = " ".join(error.format_message().split())
        for kind, words in (("integer", "whole number"), ("float", "number")):
            what = re.sub(rf"is not a valid {kind}( range)?\b", f"is not a {words}", what)
        command = error.ctx.command_path if error.ctx else "diloco-peer"
        super().__init__(f"{what}{'' if what.endswith(('.', '?')) else '.'} See `{command} --help`.")

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(fit_for_terminal(f"error: {self.message}"), file, err=True)


class _Context(click.Context):
    """A context that its command's usage errors name. Those of click's parser name none."""

    @contextmanager
    def scope(self, cleanup: bool = True) -> Iterator[click.Context]:
        try:
            with super().scope(cleanup) as context:
                yield context
        except click.UsageError as error:
            error.ctx = error.ctx or self
            raise


@contextmanager
def _usage_in_one_line() -> Iterator[None]:
    """Turn click's usage errors into errors of one line."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:  # which shows the help
        raise
    except click.UsageError as error:
        raise _WrongUsage(error) from error


class _Commands(click.Group):
    """The group of all commands. It imports a command's module when the command is needed, and reports the command's
    errors."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].partition(":")
        command: click.Command = getattr(import_module(f"opendiloco.cli.{module}"), attribute)
        for each in (command, *getattr(command, "commands", {}).values()):
            each.context_class = _Context
        return command

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = arguments[0]
        if name not in COMMANDS and not name.startswith("-") and not context.resilient_parsing:
            from difflib import get_close_matches

            alike = " or ".join(map(repr, get_close_matches(name, COMMANDS)))
            raise click.UsageError(f"No such command {name!r}." + (f" Did you mean {alike}?" if alike else ""), context)
        return super().resolve_command(context, arguments)

    def format_help_text(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(context, formatter)
        with formatter.section("First steps"):
            formatter.write_dl(FIRST_STEPS)

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        lines = "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())
        formatter.write(f"\nExit codes:\n{lines}\n")

    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        with _usage_in_one_line():
            return super().make_context(*arguments, **extra)

    def invoke(self, context: click.Context) -> object:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # replace characters that the terminal's encoding does not have
                stream.reconfigure(errors="backslashreplace" if stream is sys.stderr else "replace")
        # Other users must not write to new files and folders, because torch runs compiled code from its cache folder.
        os.umask(os.umask(0o077) | 0o022)
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # the stages in our log show the progress
        try:
            with _usage_in_one_line():
                result: object = super().invoke(context)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except KeyboardInterrupt:
            context.exit(INTERRUPTED)
        except Exception as error:
            context.exit(_report(error, debug=context.params["debug"]))
        return result


def _report(error: Exception, debug: bool) -> int:
    """Print an error on stderr in one line, and with `debug` its traceback above. Return the exit code."""
    if debug:
        click.echo("".join(traceback.format_exception(error)), err=True)
    if isinstance(error, DilocoPeerError):
        click.echo(fit_for_terminal(f"error: {error}"), err=True)
        return error.exit_code
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in ("opendiloco", "peers"):
        package = (error.name or "").partition(".")[0]
        needed = f"error: this command needs the Python package {package}, which is not installed here."
        remedy = "Only a bootstrap node runs without it. Install diloco-peer again, without --no-deps."
        click.echo(f"{needed} {remedy}", err=True)
        return MachineError.exit_code
    innermost: BaseException = error
    while isinstance(innermost, BaseExceptionGroup):
        innermost = innermost.exceptions[0]
    what = " ".join(f"{type(innermost).__name__}: {innermost}".split())
    remedy = "This is a bug: run again with `diloco-peer --debug …`, and report the output."
    click.echo(fit_for_terminal(f"error: unexpected {what}. {remedy}"), err=True)
    return UNEXPECTED


def _show_version(context: click.Context, parameter: click.Parameter, is_wanted: bool) -> None:
    """Print the versions of the program and of its protocol. All peers of a run must have the same protocol version."""
    if not is_wanted or context.resilient_parsing:
        return
    from importlib.metadata import version

    from peers.values.wire import PROTOCOL_VERSION

    click.echo(f"diloco-peer {version('diloco-peer')}, protocol version {PROTOCOL_VERSION}")
    context.exit()


def _read_settings(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Read the configuration file and store its settings in click's context, from which the options take their
    values."""
    if context.resilient_parsing:
        return
    try:
        Path.home()
    except RuntimeError as error:
        user = f"the user {os.getuid()} has no entry in /etc/passwd"
        raise click.UsageError(
            f"HOME is not set, and {user}: set HOME to a folder that diloco-peer can write to.", context
        ) from error
    try:
        context.meta[FILE_KEY] = read_settings_file(path)
    except SettingsError as error:
        raise click.UsageError(str(error), context) from error
    context.meta[PATH_KEY] = path or default_settings_path()


@click.command(cls=_Commands, context_settings=HELP)
@click.option("--debug", is_flag=True, help="Show tracebacks of errors, and log all messages.")
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="DILOCO_CONFIG",
    is_eager=True,
    expose_value=False,
    callback=_read_settings,
    help="Read settings from this file.  [default: ~/.config/diloco-peer/config.toml, if it exists]",
)
@log_options
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the versions of diloco-peer and of its protocol, and exit.",
)
@click.pass_context
def main(context: click.Context, debug: bool, log_level: str | None, log_file: Path | None, log_format: str) -> None:
    """Train language models with volunteers' machines, without a data centre."""
    atexit.register(gc.freeze)  # otherwise the last collection of garbage takes seconds in a process with torch
    context.obj = log = LogOptions("debug" if debug else log_level, log_file, log_format == "json")
    if context.invoked_subcommand not in START_NO_LOG:
        log.start(LOG_LEVELS.get(str(context.invoked_subcommand), "warning"))
