"""Options of the commands: those made from settings, and those that several commands share.

What the command line does not say, the environment and the configuration file may.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from opendiloco.errors import MachineError, SettingsError
from opendiloco.settings.join_settings import JoinSettings, LogSettings, Setting, model_of, settings_of, split_address

if TYPE_CHECKING:
    import socket

    from opendiloco.data.own_files import OwnFiles
    from peers.values.identity import Identity
    from peers.values.manifest import Invite


Command = TypeVar("Command", bound=Callable[..., Any])
FILE_KEY = "opendiloco.settings.file"
PATH_KEY = "opendiloco.settings.path"
"""Where click's contexts have what the configuration file says, and its path."""
JOIN = {setting.name: setting for section in JoinSettings.SECTIONS for setting in settings_of(section)}
"""`join`'s settings by name, in the order of its help."""
INITIAL_PEERS = JOIN["initial_peers"].variable
HOW_TO_FIND_A_RUN = "Its organiser gives out an invite; `diloco-peer runs` lists the runs that a bootstrap node knows."
NAMED_NODE = re.compile(r"^(?P<peer>12D3KooW\w+)@(?P<host>[A-Za-z0-9.-]+)$")

FOLDER = click.Path(file_okay=False, path_type=Path)
EXISTING_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)


def all_of(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Return one decorator for several options, in the order of the help."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


# Options made from settings -------------------------------------------------------------------------------------------
class _SettingOption(click.Option):
    """An option for which the configuration file has a say, before the default."""

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        value, source = super().consume_value(ctx, opts)
        said = ctx.meta.get(FILE_KEY, {})
        if source is ParameterSource.DEFAULT and self.name in said:
            return said[self.name], ParameterSource.DEFAULT_MAP
        return value, source

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        try:
            return super().process_value(ctx, value)
        except click.MissingParameter as error:  # no other setting has to be given
            if ctx.info_name != "join" and (run := run_here()) is not None:
                return run
            raise click.MissingParameter(HOW_TO_FIND_A_RUN, ctx, self) from error


class RunCommand(click.Command):
    """A command about one run, whose invite may stand without --run."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[INVITE]"]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given, rest, _ = self.make_parser(ctx).parse_args(list(args))
        if len(rest) == 1:
            if given.get("run"):
                raise click.UsageError("the run is named twice: leave out --run.", ctx)
            args.remove(rest[0])
            args = ["--run", rest[0], *args]
        return super().parse_args(ctx, args)


class SettingsCommand(RunCommand):
    """A command with all settings: its help shows them section by section, as the reference does."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        titles = {setting.name: part.TITLE for part in JoinSettings.SECTIONS for setting in settings_of(part)}
        rows: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                rows.setdefault(titles.get(parameter.name or "", "Options"), []).append(record)
        for title, records in rows.items():
            with formatter.section(title):
                formatter.write_dl(records)


def is_typed(context: click.Context, name: str) -> bool:
    """Return whether the command line itself has this option."""
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _option_for(setting: Setting, **changed: Any) -> Callable[[Command], Command]:
    """Return click's option for a setting, with what is `changed` of that."""
    about: dict[str, Any] = {
        "cls": _SettingOption,
        "type": _type_of(setting),
        "multiple": setting.is_repeated,
        "metavar": setting.metavar,
        "envvar": setting.variable,
        "help": setting.help,
        "show_default": False,
    }
    # An option that has to be given must have no default, not even None: click would take that for given.
    about |= ({"required": True} if setting.is_required else {"default": setting.default}) | changed
    if setting.default_text is not None:
        about["help"] += f"  [default: {setting.default_text}]"
    return click.option(setting.spelling, setting.name, **about)


def join_option(name: str, **changed: Any) -> Callable[[Command], Command]:
    """Return the option for one of `join`'s settings, for a command that shares it."""
    return _option_for(JOIN[name], **changed)


def typed_option(name: str, *, click_type: Any = None, **about: Any) -> Callable[[Any], Any]:
    """Return the option for one of `join`'s settings where neither the environment nor the file has a say.

    `about` is what is another there than in `join`, as `Setting` has it.
    """
    setting = replace(JOIN[name], **about)

    def checked(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        try:
            if setting.check is not None and value is not None:
                setting.check(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
        return value

    changed = {} if click_type is None else {"type": click_type}
    return _option_for(setting, cls=click.Option, envvar=None, callback=checked, **changed)


def join_settings(needs_run: bool = True) -> Callable[[Command], Command]:
    """Give a command all of `join`'s options, and what they say as one argument: `settings`.

    Unless it `needs_run`, none needs to be named: `run` is empty then.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_settings(*arguments: Any, **values: Any) -> Any:
            own = {name: values.pop(name) for name in JOIN}
            given = {"run": ""} | {name: value for name, value in own.items() if value is not None}
            return command(*arguments, settings=_checked(given), **values)

        options = (join_option(name, required=needs_run and setting.is_required) for name, setting in JOIN.items())
        return all_of(*options)(cast(Command, with_settings))

    return decorate


def _checked(values: Mapping[str, Any]) -> JoinSettings:
    """Return settings made of values. Raises: BadParameter that names the option of the first that is wrong."""
    from pydantic import ValidationError

    try:
        return JoinSettings(**dict(model_of(JoinSettings).model_validate(dict(values))))
    except ValidationError as error:
        problem = error.errors()[0]
        option = f"--{JOIN[str(problem['loc'][0])].option}"
        raise click.BadParameter(f"{problem['input']!s}: {problem['msg']}.", param_hint=repr(option)) from error


def _type_of(setting: Setting) -> Any:
    """Return click's type for one value."""
    if setting.choices:
        return click.Choice(setting.choices)
    if setting.kind is Path:
        return click.Path(path_type=Path, file_okay=setting.metavar != "FOLDER", dir_okay=setting.metavar != "FILE")
    if setting.kind not in (int, float):
        return bool if setting.kind is bool else str
    low = setting.least if setting.above is None else setting.above
    if low is None and setting.most is None:
        return setting.kind
    bounded: Any = click.IntRange if setting.kind is int else click.FloatRange
    return bounded(low, setting.most, min_open=setting.above is not None)


def run_here() -> str | None:
    """Return the id of the run that this machine's volunteers train in; None without one, or if there are several."""
    from opendiloco.owner.controls import volunteers
    from opendiloco.storage.run_folder import default_state_folder

    runs = {path.parent.parent.name for path in volunteers(default_state_folder())}
    return runs.pop() if len(runs) == 1 else None


# Options that several commands share ----------------------------------------------------------------------------------
log_options = all_of(*map(_option_for, settings_of(LogSettings)))
initial_peers_option = join_option("initial_peers")
run_option = join_option("run")
dashboard_option = typed_option("dashboard")
reader_option = click.option(
    "--identity",
    type=FILE,
    help="Look as the peer with this key file: runs by invitation show themselves to their organiser.",
)
own_files_options = all_of(
    typed_option("model", click_type=EXISTING_FOLDER),
    typed_option("tokenizer", click_type=click.Path(exists=True, path_type=Path)),
)
"""The options of `OwnFiles`."""


def data_option(help: str) -> Callable[[Command], Command]:
    """Return the option for the folders of a run's local sources. `help` says what is done with their text."""
    help += " Given for each of the run's sources that is local, in their order."
    return typed_option("data", help=help, click_type=click.Path(exists=True, path_type=Path))


def own_words(data: Sequence[Path], own: OwnFiles) -> list[str]:
    """Return these options as others have to type them, whose paths are their own."""
    named = [name for name, path in vars(own).items() if path is not None]
    return ["--data", "TEXTS"] * len(data) + [word for name in named for word in (f"--{name}", "PATH")]


def open_dashboard(address: str | None) -> socket.socket | None:
    """Begin to listen at HOST:PORT, and say where; None: nobody wants it. Raises: LocalNetworkError."""
    if address is None:
        return None
    from opendiloco.dashboard.server import bind, url_of

    listening = bind(split_address(address))
    click.echo(f"The dashboard is at {url_of(listening)}", err=True)
    return listening


@contextmanager
def reader(path: Path | None) -> Iterator[Identity]:
    """Yield the key of this file, or a new one, to look at a run with. Raises: LocalNetworkError."""
    from opendiloco.volunteer.identity import hold_identity
    from peers.values.identity import Identity

    if path is None:
        yield Identity.generate()
    else:
        with hold_identity(path) as key:
            yield key


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Write to a file or make a folder. Raises: MachineError with the remedy where that cannot be done."""
    try:
        yield
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror}.", remedy) from error


def refuse_torchrun(environment: Mapping[str, str]) -> None:
    """Raise SettingsError in one of several processes of torchrun: each would be a volunteer, on the same GPUs."""
    size = environment.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in environment and size != "1":  # Slurm and Kubeflow set WORLD_SIZE, too
        raise SettingsError(
            f"torchrun has started {size} processes (WORLD_SIZE), of which each would be a volunteer.",
            "Join from each machine, without torchrun: each is a volunteer of its own, with a worker for each of its "
            "GPUs.",
        )


def parse_run(run: str, initial_peers: tuple[str, ...], state: Path | None = None) -> Invite:
    """Return the run and the addresses for it: those of the invite and of the option, or else of the environment
    or the configuration file, or else those that this machine remembers of the run, in the `state` folder, or what the
    local network says. Raises: ManifestError; UsageError when there are no addresses."""
    from peers.values.manifest import Invite

    invite, initial_peers = Invite.parse(run), spelled_out(initial_peers)
    if invite.addresses and not is_typed(click.get_current_context(), "initial_peers"):
        return invite  # the environment and the file may be about another swarm
    addresses = tuple(dict.fromkeys((*invite.addresses, *initial_peers)))
    if not addresses:
        from opendiloco.storage.run_folder import remembered_addresses

        addresses = remembered_addresses(invite.run_id, state) or _nearby(invite.run_id)
    return Invite(invite.run_id, known_addresses(addresses, "a run id does not say where the swarm is"))


def _nearby(run_id: str) -> tuple[str, ...]:
    """Return what the local network says of a run, if the setting lets us ask: few commands have an option for it."""
    import asyncio

    from peers.network.neighbours import neighbours

    context = click.get_current_context()
    [option] = join_option("local_network")(lambda: None).__click_params__  # type: ignore[attr-defined]
    if not option.type_cast_value(context, option.consume_value(context, context.params)[0]):
        return ()
    click.echo("No address is known here: looking for the run in the local network", err=True)
    return asyncio.run(neighbours(run_id))


def known_addresses(addresses: tuple[str, ...], why: str = "nobody here knows where the swarm is") -> tuple[str, ...]:
    """Return the addresses if there are any. Raises: UsageError that says how to get one."""
    if not addresses:
        raise click.UsageError(
            f"{why}: add --initial-peer, set {INITIAL_PEERS}, or initial_peers in the configuration file, or give the "
            "invite. Organisers publish invites and addresses of bootstrap nodes; `diloco-peer bootstrap` begins a "
            "swarm of your own, and prints its address."
        )
    return spelled_out(addresses)


def spelled_out(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses as multiaddrs: PEER@example.org is short for a node whose addresses the DNS knows."""
    return tuple(NAMED_NODE.sub(r"/dnsaddr/\g<host>/p2p/\g<peer>", address) for address in addresses)
