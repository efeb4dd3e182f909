"""The command group: finds commands in their modules, and turns errors into one line and an exit code."""

from __future__ import annotations

import io
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import FILE_KEY, PATH_KEY, log_options
from opendiloco.errors import MachineError, SettingsError, fit_for_terminal
from opendiloco.settings.join_settings import default_settings_path, read_settings_file
from peers.errors import DilocoPeerError

EXIT_CODES = {
    0: "all went well, or a polite leave",
    1: "an unexpected error: a bug; or a demo whose peers disagree, whose model did not learn, or that was too short",
    2: "wrong usage: an option, argument, environment variable or configuration file",
    3: "a wrong or tampered manifest, invite, run id, run.toml or links.toml; an amendment that is not understood here",
    4: "the swarm is out of reach: no bootstrap node answers, the run is unknown, or nobody is there",
    5: "this machine's side of the network: an identity file, an address, libp2p's daemon",
    6: "this machine does not fit: memory, disk, torch, or a device that is not there or of no use to torch",
    7: "the corpus is missing, unreadable, too small, or a local folder not named with --data, --model or --tokenizer",
    8: "training failed: a worker died too often, a GPU failed, or a loss or weight is not finite",
    9: "a checkpoint is missing, damaged, or of another run",
    10: "a remote folder cannot be used: its URL, the package for it, or its credentials",
    11: "a log whose headers, payloads or states are not what its digests say",
    12: "a peer of a run that is followed has another state than the log leads to, or this machine has",
    13: "a run by invitation does not admit this machine: no ticket, or one that is expired or revoked",
    14: "another machine takes part with the same key: a copied identity file",
    15: "a port or an identity file is in use by another program on this machine",
    16: "`doctor` has found what keeps this machine from training, or from taking part in the run",
    70: "the protocol was broken: a bug, ours or a peer's",
    130: "left at once: after a second Ctrl-C, or the first where there is nothing to finish",
}
"""What each exit status means: the one table of them, which `diloco-peer --help` shows."""
UNEXPECTED, UNFIT, INTERRUPTED = 1, 16, 130  # those of the table that the command line itself ends with

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
"""Each command in the order of `--help`: its module, and its name there."""

LOG_LEVELS = {"bootstrap": "info", "tokenize": "info", "follow": "info", "doctor": "error"}
"""What a command logs, unless the options say otherwise; the others log warnings."""
START_NO_LOG = {"join", "pause", "resume", "finish", "service", "config", "identity"}
"""`join` looks at its screen first; the others must work also where the log file cannot be written."""

FIRST_STEPS = (
    ("diloco-peer demo", "See a swarm train on this machine: three minutes."),
    ("diloco-peer doctor", "Find out whether this machine can train."),
    ("diloco-peer join --run INVITE", "Train in a run. Its organiser gives out the invite."),
    ("diloco-peer bootstrap", "Be the node through which the peers of a run of your own find each other."),
)
HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True}


class _Commands(click.Group):
    """Loads commands on demand. Their errors end here."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].partition(":")
        command: click.Command = getattr(import_module(f"opendiloco.cli.{module}"), attribute)
        return command

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command as click does. The error for an unknown one names those that are spelled alike."""
        name = arguments[0]
        if name not in COMMANDS and not name.startswith("-") and not context.resilient_parsing:
            from difflib import get_close_matches

            alike = " or ".join(map(repr, get_close_matches(name, COMMANDS)))
            raise click.UsageError(f"No such command {name!r}." + (f" Did you mean {alike}?" if alike else ""), context)
        return super().resolve_command(context, arguments)

    def format_help_text(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(context, formatter)
        with formatter.section("To begin"):
            formatter.write_dl(FIRST_STEPS)

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        lines = "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())
        formatter.write(f"\nExit codes:\n{lines}\n")

    def invoke(self, context: click.Context) -> object:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # what a terminal's encoding lacks is shown as a question mark
                stream.reconfigure(errors="backslashreplace" if stream is sys.stderr else "replace")
        # Libraries make files and folders as the umask says: torch runs compiled code that it finds in one of them.
        os.umask(os.umask(0o077) | 0o022)
        try:
            result: object = super().invoke(context)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except KeyboardInterrupt:
            context.exit(INTERRUPTED)
        except Exception as error:
            context.exit(_report(error, debug=context.params["debug"]))
        return result


def _report(error: Exception, debug: bool) -> int:
    """Print on stderr what happened: one line, and with `debug` the traceback. Returns the exit code."""
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
    remedy = "This is a bug: run again with `diloco-peer --debug …`, and report what it shows."
    click.echo(fit_for_terminal(f"error: unexpected {what}. {remedy}"), err=True)
    return UNEXPECTED


def _show_version(context: click.Context, parameter: click.Parameter, is_wanted: bool) -> None:
    """Print which version this is, and which protocol it speaks: peers of one run speak the same."""
    if not is_wanted or context.resilient_parsing:
        return
    from importlib.metadata import version

    from peers.values.wire import PROTOCOL_VERSION

    click.echo(f"diloco-peer {version('diloco-peer')}, protocol version {PROTOCOL_VERSION}")
    context.exit()


def _read_settings(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Read what the configuration file says for all options that it may have."""
    if context.resilient_parsing:
        return
    try:
        Path.home()
    except RuntimeError as error:
        user = f"the user {os.getuid()} has no entry in /etc/passwd"
        raise click.UsageError(
            f"HOME is not set, and {user}: set HOME to a folder for what is kept.", context
        ) from error
    try:
        context.meta[FILE_KEY] = read_settings_file(path)
    except SettingsError as error:
        raise click.UsageError(str(error), context) from error
    context.meta[PATH_KEY] = path or default_settings_path()


@click.command(cls=_Commands, context_settings=HELP)
@click.option("--debug", is_flag=True, help="Show tracebacks of errors, and log everything.")
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="DILOCO_CONFIG",
    is_eager=True,
    expose_value=False,
    callback=_read_settings,
    help="Take settings from this file.  [default: ~/.config/diloco-peer/config.toml, if it is there]",
)
@log_options
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version, and that of the protocol, and exit.",
)
@click.pass_context
def main(context: click.Context, debug: bool, log_level: str | None, log_file: Path | None, log_format: str) -> None:
    """Lend a machine to a language-model training run that nobody's data centre hosts."""
    context.obj = log = LogOptions("debug" if debug else log_level, log_file, log_format == "json")
    if context.invoked_subcommand not in START_NO_LOG:
        log.start(LOG_LEVELS.get(str(context.invoked_subcommand), "warning"))
