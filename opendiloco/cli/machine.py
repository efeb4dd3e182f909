"""The commands about this machine: `demo`, `doctor`, `config`, `service` and `identity`."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from opendiloco.cli.group import INTERRUPTED, UNFIT
from opendiloco.cli.options import (
    FILE,
    FOLDER,
    PATH_KEY,
    RunOptionCommand,
    SettingsCommand,
    join_option,
    join_settings,
    parse_run,
    refuse_torchrun,
    tcp_ports,
)
from opendiloco.errors import MachineError
from opendiloco.settings.join_settings import (
    SECTIONS,
    JoinSettings,
    LogSettings,
    Setting,
    default_settings_path,
    settings_of,
    unknown_variables,
)
from peers.errors import IdentityFileError, InUseError, remedy_for

if TYPE_CHECKING:
    from opendiloco.tools.doctor.findings import Finding
    from peers.values.identity import Identity


@click.command(short_help="Watch a swarm train a small model on this machine.")
@click.option("--peers", type=click.IntRange(min=1), metavar="N", default=3, help="Number of volunteers.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0.5),
    metavar="N",
    default=3.0,
    help="Duration. At half time a volunteer is killed and another one joins, which takes up to a minute.",
)
@click.option("--run", type=FILE, help="run.toml of the run.  [default: a small Llama on Python's standard library]")
@click.option("--out", type=FOLDER, help="New folder for the model and the logs.  [default: a temporary one]")
@click.option("--plain", is_flag=True, help="Print lines instead of a live screen.")
def demo(peers: int, minutes: float, run: Path | None, out: Path | None, plain: bool) -> None:
    """Watch a swarm of volunteers train a small model on this machine."""
    from opendiloco.tools.demo import DemoScreen, run_demo
    from opendiloco.volunteer.interrupts import run_interruptible

    with DemoScreen(minutes * 60, plain) as screen:
        result = run_interruptible(lambda interrupts: run_demo(peers, run, out, screen))
    if result is None:
        raise SystemExit(INTERRUPTED)
    facts = result.facts
    assert facts.held_out_loss is not None
    summary = (
        ("run", facts.run_id),
        ("trained", f"{facts.outer_steps} outer steps, {facts.tokens:,} tokens"),
        ("held-out loss", f"{result.before:.3f} before, {facts.held_out_loss:.3f} after (nats per token)"),
        ("digests", str(result.agreement)),
        ("model", f"{result.folder / 'model'} (for AutoModelForCausalLM.from_pretrained)"),
        ("logs", str(result.folder / "logs")),
    )
    screen.say("\nsample text of the model:\n")
    for line in result.sample.splitlines():
        screen.say(f"    {line}")
    screen.say("")
    for name, text in summary:
        screen.say(f"{name:<15}{text}")
    for problem in result.problems:
        click.echo(f"error: {problem}", err=True)
    raise SystemExit(1 if result.problems else 0)


def _key_for_doctor(named: Path | None, addresses: Sequence[str]) -> tuple[Identity, str]:
    """Return the key for `doctor`, and the remedy if a run refuses it (empty for the key of `join`). The key is that of
    `join`, or a new one if that one is missing, in use, unreadable or the key of a node at the `addresses`, because no
    node talks to itself. Raises: IdentityFileError if the file `named` cannot be read."""
    from opendiloco.volunteer.identity import default_path, hold_identity
    from peers.values.identity import Identity

    path = named or default_path()
    option = f" --identity {shlex.quote(str(path))}" if named else ""
    why = f"missing: make it with `diloco-peer identity show{option}`, and ask for a ticket for its peer id"
    if os.path.exists(path) or (path.parent.is_dir() and not os.access(path.parent, os.X_OK)):
        try:
            with hold_identity(path) as key:
                pass  # the lock is released at once, so that a volunteer can start meanwhile
            if not any(key.peer_id in address for address in addresses):
                return key, ""
            why = "the key of the bootstrap node, too: join with another one, --identity FILE"
        except InUseError:
            why = "in use: leave the run first"
        except IdentityFileError as error:
            if named:
                raise
            click.echo(f"warning: {error}", err=True)
            why = "unreadable: mend it or move it away"
    return Identity.generate(), f"doctor tried a new key, because {path} is {why}."


@click.command(cls=SettingsCommand, short_help="Check that this machine can train, or name what to change.")
@join_settings(needs_run=False)
@click.option(
    "--trial/--no-trial",
    default=True,
    help="With --run: train for some seconds to measure the speed; without the trial it is estimated, if possible.",
)
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def doctor(settings: JoinSettings, trial: bool, is_json: bool) -> None:
    """Check that this machine can train, and print a remedy for each problem.

    With --run, also check that it can take part in that run, and estimate its speed and traffic. The options are those
    of `join`. The command changes nothing, and its trial adds nothing to the run.
    """
    from rich.console import Console

    from opendiloco.tools.doctor.examination import Examination
    from opendiloco.tools.doctor.findings import Verdict, as_json, conclusion, show, worst
    from opendiloco.volunteer.interrupts import run_interruptible

    refuse_torchrun(os.environ)
    invite = parse_run(settings.run, settings.initial_peers, settings.state) if settings.run else None
    console = Console()
    is_live = console.is_terminal and not is_json
    key, if_refused = _key_for_doctor(settings.identity, invite.addresses if invite else settings.initial_peers)
    with console.status("") if is_live else nullcontext() as status:

        def tell(finding: Finding) -> None:
            if not is_json:
                show(console, finding)

        def at(what: str) -> None:
            if status is not None:
                status.update(f"{what} …")

        examination = Examination(settings, invite, key, trial, tell, at, if_refused)
        findings = run_interruptible(lambda interrupts: examination.run())
    if findings is None:
        raise SystemExit(INTERRUPTED)
    conclude = as_json if is_json else conclusion
    click.echo(conclude(findings, invite.run_id if invite else None))
    raise SystemExit(UNFIT if worst(findings) is Verdict.FAIL else 0)


@click.group()
def config_group() -> None:
    """Show the settings of this machine."""


@config_group.command("show", cls=RunOptionCommand, short_help="Print each setting and its source.")
@join_settings(needs_run=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: each setting's `value` and `from`.")
@click.pass_context
def _show_config(context: click.Context, settings: JoinSettings, as_json: bool) -> None:
    """Print the settings that `join` would use with the same options, and the source of each value: the command line,
    an environment variable, the configuration file, or the default."""
    shown: dict[str, dict[str, Any]] = {}
    lines = []
    for section in SECTIONS:
        where = context.find_root() if section is LogSettings else context
        lines += ["", f"# {section.TITLE}"]
        for setting in settings_of(section):
            origin = _origin(where, setting)
            value = where.params[setting.name] if section is LogSettings else getattr(settings, setting.name)
            value = None if value == "" and setting.is_required else value
            shown[setting.name] = {"value": value, "from": origin}
            lines.append(_line(setting, value, origin))
    if as_json:
        click.echo(json.dumps(shown, indent=2, default=str))
        return
    path = context.meta[PATH_KEY]
    click.echo(f"configuration file: {path}{'' if path.exists() else ' (missing)'}")
    click.echo("\n".join(lines))
    for warning in unknown_variables(os.environ):
        click.echo(f"warning: {warning}", err=True)


def _origin(context: click.Context, setting: Setting) -> str:
    source = context.get_parameter_source(setting.name)
    if source is ParameterSource.ENVIRONMENT:
        return f"environment, {setting.variable}"
    if source is ParameterSource.COMMANDLINE:
        return "command line"
    return "file" if source is ParameterSource.DEFAULT_MAP else "default"


def _line(setting: Setting, value: Any, origin: str) -> str:
    if value is None or value == ():
        unset = f"# {setting.name}"
        return f"{unset}  ({setting.default_text})" if setting.default_text else unset
    return f"{setting.name} = {json.dumps(value, default=str)}  # {origin}"


@click.group()
def identity_group() -> None:
    """Show the peer id of this machine, and the path of its key file."""


@identity_group.command("show", short_help="Print the peer id and the path of the key.")
@join_option("identity", help="This machine's key file.")
def _show_identity(identity: Path | None) -> None:
    """Print the peer id of this machine's key, and the path of the key file. A key that does not exist is created."""
    from opendiloco.volunteer.identity import load_identity, usable_path

    path = usable_path(identity)
    click.echo(f"peer id:   {load_identity(path).peer_id}")
    click.echo(f"key file:  {path}")


# Services of systemd --------------------------------------------------------------------------------------------------
_FIRST_LINE = "# Written by `diloco-peer service install`."
_SERVICE = (
    f"{_FIRST_LINE} docs/operating.md says more.\n"
    + """\
[Unit]
Description=diloco-peer {command}
Wants=network-online.target
After=network-online.target

[Service]
Type=exec
{where}
Environment=PYTHONUNBUFFERED=1
ExecStart={program}
KillMode=mixed
TimeoutStopSec={leave}
OOMPolicy=continue
Restart=on-failure
RestartSec=30
RestartPreventExitStatus={final}
SuccessExitStatus=130
LimitNOFILE=65536
NoNewPrivileges=yes

[Install]
WantedBy={target}
"""
)
FINAL_CODES = "2 3 6 7 9 10 11 13 14 15"
"""Exit codes after which systemd must not restart the process, because only a person can fix the cause."""
_HIDDEN = ("/tmp", "/var/tmp", "/root", "/home")
"""Folders that a user made by systemd cannot read: DynamicUser has a /tmp of its own, and home folders are private."""
_LEAVE_SECONDS = {"join": 300, "bootstrap": 30}  # seconds from systemd's request to stop until it kills the process


@click.group()
def service_group() -> None:
    """Run a volunteer or a bootstrap node as a systemd service."""


@service_group.command(
    "install",
    short_help="Write a systemd unit, and print how to start it.",
    context_settings={"ignore_unknown_options": True},
)
@click.option(
    "--system", is_flag=True, help="Write a unit for a bootstrap node that starts with the machine; needs root."
)
@click.option("--print", "prints", is_flag=True, help="Print the unit instead of writing it.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS OF THE COMMAND]...")
def _install(system: bool, prints: bool, arguments: tuple[str, ...]) -> None:
    """Write a systemd unit that runs `join ARGUMENTS` as this user, or with --system `bootstrap ARGUMENTS`. Print
    how to start it. With --print, only print the unit.

    With --system the unit belongs to the machine, and its process runs as a user that systemd creates. The command
    replaces a unit that it wrote before, and starts nothing. Relative paths start at the current folder, with --system
    at /var/lib/diloco-bootstrap.
    """
    from peers.values.manifest import Invite
    from peers.values.system import make_private_folder

    command = "bootstrap" if system else "join"
    given = ["--plain", *arguments]
    if system:
        is_named = any(word.partition("=")[0] == "--identity" for word in arguments)
        given = [*arguments] if is_named else ["--identity", "bootstrap.pem", *arguments]
    group: Any = click.get_current_context().find_root().command
    if "DILOCO_RUN" in os.environ:
        raise click.UsageError("DILOCO_RUN is set here, but the unit will not have it: give the run as an argument.")
    within = click.get_current_context().find_root()
    try:
        checked = group.get_command(within, command).make_context(command, list(given), parent=within)
    except click.UsageError as error:  # `join` or `bootstrap` does not accept the arguments of the unit
        error.ctx = click.get_current_context()  # shows the usage of this command
        raise
    if not system:
        Invite.parse(checked.params["run"])  # raises ManifestError for a wrong invite
    for place in (sys.executable, os.path.realpath(sys.executable), __file__) if system else ():
        if any(Path(place).is_relative_to(folder) for folder in _HIDDEN):
            refusal = MachineError(
                f"the unit's user could not read {place}: nothing below {', '.join(_HIDDEN)}.",
                "Install diloco-peer in a virtual environment such as /opt/diloco-peer, made with a Python that all "
                "users can read, such as /usr/bin/python3, and run that one.",
            )
            if not prints:
                raise refusal
            click.echo(f"warning: {refusal}", err=True)
            break
    if not (system or find_spec("torch")):
        remedy = "Install diloco-peer again, without --no-deps."
        click.echo(f"warning: `join` needs the Python package torch, which is not installed here. {remedy}", err=True)
    name = "diloco-bootstrap" if system else "diloco-volunteer"
    if system:
        low = [f"port {port}" for _, _, port in tcp_ports(checked.params) if 0 < port < 1024]
        paths = filter(None, map(checked.params.get, ("identity", "directory", "archive")))
        home = Path("/var/lib", name)
        outside = [str(path) for path in paths if not (home / path).is_relative_to(home)]
        if forbidden := ", ".join(dict.fromkeys((*low, *outside))):
            remedy = f"Choose ports from 1024 on, and paths in {home}."
            click.echo(f"warning: the unit's user may not use {forbidden}. {remedy}", err=True)
    folder = Path("/etc/systemd/system") if system else default_settings_path().parents[1] / "systemd" / "user"
    own = f"DynamicUser=yes\nStateDirectory={name}\nWorkingDirectory=%S/{name}\nEnvironment=HOME=%S/{name}"
    unit = _SERVICE.format(
        command=command,
        where=own if system else f"WorkingDirectory={_for_systemd(str(Path.cwd()))}",
        program=" ".join(map(_for_systemd, [sys.executable, "-m", "opendiloco.cli", command, *given])),
        leave=_LEAVE_SECONDS[command],
        final=FINAL_CODES,
        target="multi-user.target" if system else "default.target",
    )
    if prints:
        click.echo(unit, nl=False)
        return
    path = folder / f"{name}.service"
    try:
        if path.exists() and not path.read_text(encoding="utf-8").startswith(_FIRST_LINE):
            raise MachineError(
                f"{path} exists, and `service install` did not write it.",
                "Move it away, or print the new unit with --print and merge them.",
            )
        make_private_folder(folder)
        path.write_text(unit, encoding="utf-8")
    except OSError as error:
        remedy = "Run it as root." if system else "Print the unit with --print, and write it where systemd finds it."
        raise MachineError(f"cannot write {path}: {error.strerror}.", remedy_for(error, remedy)) from error
    control = "systemctl" if system else "systemctl --user"
    click.echo(f"wrote {path}. To start it now and at each {'boot' if system else 'login'}:")
    click.echo(f"  {control} daemon-reload && {control} enable --now {name}")
    if not system:
        click.echo("  loginctl enable-linger        # so that it also runs while you are logged out")
    click.echo(f"  journalctl {'' if system else '--user '}--unit {name} --follow")


def _for_systemd(word: str) -> str:
    """Return `word` quoted for a systemd unit, because systemd replaces % and $, and splits at spaces."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != word or re.search(r"[\s;']", word) or not word else word
