"""The options of the commands: options made from settings, and options that several commands share.

The first of these that has a value counts: the command line, the environment, the configuration file.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import click
from click.core import ParameterSource

from opendiloco.errors import MachineError, SettingsError
from opendiloco.settings.join_settings import JoinSettings, LogSettings, Setting, model_of, settings_of, split_address
from peers.errors import remedy_for

if TYPE_CHECKING:
    import socket

    from opendiloco.data.own_files import OwnFiles
    from peers.values.identity import Identity
    from peers.values.manifest import Invite


Command = TypeVar("Command", bound=Callable[..., Any])
FILE_KEY = "opendiloco.settings.file"
PATH_KEY = "opendiloco.settings.path"
"""Keys of a click context's `meta` for the content of the configuration file and for its path."""
JOIN = {setting.name: setting for section in JoinSettings.SECTIONS for setting in settings_of(section)}
"""The settings of `join` by name, in the order of its help."""
INITIAL_PEERS = JOIN["initial_peers"].variable
HOW_TO_FIND_A_RUN = "Ask its organiser for an invite; `diloco-peer runs` lists the runs that a bootstrap node knows."
ANY_PORT, EVERYWHERE = ("/ip4/0.0.0.0/tcp/0",), {"0.0.0.0", "::"}
LISTENER = re.compile(r"/\w+/(?P<host>[^/]+)/tcp/(?P<port>\d+)")
NAMED_NODE = re.compile(r"^(?P<peer>12D3KooW\w+)@(?P<host>[A-Za-z0-9.-]+)$")


class _ExistingPath(click.Path):
    """A click path whose errors end with a remedy."""

    def fail(self, message: str, param: click.Parameter | None = None, ctx: click.Context | None = None) -> NoReturn:
        super().fail(f"{message} Give another path.", param, ctx)


FOLDER = click.Path(file_okay=False, path_type=Path)
EXISTING_FOLDER = _ExistingPath(exists=True, file_okay=False, path_type=Path)
EXISTING_PATH = _ExistingPath(exists=True, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)


def all_of(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Return one decorator that adds several options to a command. The command's help lists them in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


# Options made from settings -------------------------------------------------------------------------------------------
class _SettingOption(click.Option):
    """A click option whose default is the value in the configuration file, if the file has one."""

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        value, source = super().consume_value(ctx, opts)
        values = ctx.meta.get(FILE_KEY, {})
        if source is ParameterSource.DEFAULT and self.name in values:
            return values[self.name], ParameterSource.DEFAULT_MAP
        return value, source

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        try:
            return super().process_value(ctx, value)
        except click.MissingParameter as error:  # only `run` can be missing, because no other setting is required
            if ctx.info_name != "join" and (run := run_here()) is not None:
                return run
            raise click.MissingParameter(HOW_TO_FIND_A_RUN, ctx, self) from error


class RunOptionCommand(click.Command):
    """A command about one run, which refuses a --run without an invite, as an empty variable leaves it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # otherwise the shell completes an unfinished command line
            empty = click.UsageError("--run has no invite after it: if you gave a variable, it is empty.", ctx)
            if args[-1:] == ["--run"]:
                raise empty
            given, rest, _ = self.make_parser(ctx).parse_args(list(args))
            if "run" in given and (given["run"] or "-").startswith("-"):
                raise empty
            args = self.with_run(ctx, args, given, rest)
        return super().parse_args(ctx, args)

    def with_run(self, ctx: click.Context, args: list[str], given: Mapping[str, Any], rest: list[str]) -> list[str]:
        """Return `args`, which contain the options `given` and the arguments `rest`, with the run as --run."""
        return args


class RunCommand(RunOptionCommand):
    """A command about one run, which accepts the run's invite as an argument, without --run."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[INVITE]"]

    def with_run(self, ctx: click.Context, args: list[str], given: Mapping[str, Any], rest: list[str]) -> list[str]:
        if len(rest) == 1:
            if given.get("run"):
                raise click.UsageError("the run is named twice: leave out --run.", ctx)
            if not rest[0]:
                raise click.UsageError("INVITE is empty: give the invite; if you gave a variable, it is empty.", ctx)
            args.remove(rest[0])
            args = ["--run", rest[0], *args]
        return args


class SettingsCommand(RunCommand):
    """A command with an option for each setting of `join`. Its help divides the options into sections, as the reference
    page does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            check_together(ctx)
        return rest

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


def check_together(context: click.Context, default_listen: Sequence[str] = ANY_PORT) -> None:
    """Check the options of `join` or `bootstrap` for those that have no effect without another one, and for two that
    have the same port. Raises: UsageError."""
    if is_typed(context, "metrics_host") and context.params["metrics_port"] is None:
        raise click.UsageError("--metrics-host is the address of metrics: give --metrics-port N, too.", context)
    for (one, here, port), (other, there, same) in combinations(tcp_ports(context.params, default_listen), 2):
        is_one_family = (":" in here) == (":" in there)  # sockets of both may have the same port
        if one != other and port == same != 0 and (here == there or (EVERYWHERE & {here, there} and is_one_family)):
            raise click.UsageError(f"{one} and {other} both have port {port}: choose another for one of them.", context)


def tcp_ports(values: Mapping[str, Any], default_listen: Sequence[str] = ANY_PORT) -> list[tuple[str, str, int]]:
    """Return the TCP ports in the options of `join` or `bootstrap`, 0 for any port, each after its option and host."""
    found = filter(None, map(LISTENER.match, values["listen"] or default_listen))
    ports = [("--listen", match["host"], int(match["port"])) for match in found]
    ports += [("--data-port", host, values["data_port"]) for _, host, _ in ports]
    if values["metrics_port"] is not None:
        ports.append(("--metrics-port", values["metrics_host"], values["metrics_port"]))
    with suppress(ValueError):  # `join` reports a malformed address later
        ports += [("--dashboard", *split_address(values["dashboard"]))] if values["dashboard"] else []
    return ports


def is_typed(context: click.Context, name: str) -> bool:
    """Return True if the option `name` was given on the command line."""
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _option_for(setting: Setting, **changed: Any) -> Callable[[Command], Command]:
    """Return a decorator that adds the click option for a setting. `changed` overrides arguments of `click.option`."""
    about: dict[str, Any] = {
        "cls": _SettingOption,
        "type": _type_of(setting),
        "multiple": setting.is_repeated,
        "metavar": setting.metavar,
        "envvar": setting.variable,
        "help": setting.help,
        "show_default": False,
    }
    # A required option must have no default at all, because click would treat a default of None as a given value.
    about |= ({"required": True} if setting.is_required else {"default": setting.default}) | changed
    if setting.default_text is not None:
        about["help"] += f"  [default: {setting.default_text}]"
    return click.option(setting.spelling, setting.name, **about)


def join_option(name: str, **changed: Any) -> Callable[[Command], Command]:
    """Return a decorator that adds a `join` setting's option. `changed` overrides arguments of `click.option`."""
    return _option_for(JOIN[name], **changed)


def typed_option(name: str, *, click_type: Any = None, **about: Any) -> Callable[[Any], Any]:
    """Return a decorator that adds the option for a setting of `join`. Only the command line can set the option, not
    the environment or the configuration file.

    `about` overrides fields of the `Setting`.
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
    """Return a decorator that adds all options of `join` and passes their values as one argument, `settings`.

    Without `needs_run` the run is optional, and `settings.run` may be empty.
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
    """Check the values of `join`'s settings, and return the settings. Raises: BadParameter, which names the option of
    the first wrong value."""
    from pydantic import ValidationError

    try:
        return JoinSettings(**dict(model_of(JoinSettings).model_validate(dict(values))))
    except ValidationError as error:
        problem = error.errors()[0]
        option, value, why = f"--{JOIN[str(problem['loc'][0])].option}", problem["input"], problem["msg"]
        text = why if repr(value) in why else f"{value!s}: {why}"
        raise click.BadParameter(f"{text}.", param_hint=repr(option)) from error


def _type_of(setting: Setting) -> Any:
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
    """Return the id of the run in which this machine's volunteers train; None if they train in none or in several."""
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
    help="Key file to use: a run by invitation answers only its organiser and admitted peers.",
)
own_files_options = all_of(
    typed_option("model", click_type=EXISTING_FOLDER),
    typed_option("tokenizer", click_type=EXISTING_PATH),
)
"""The options for `OwnFiles`."""


def data_option(help: str) -> Callable[[Command], Command]:
    """Return a decorator that adds --data, which names the folders of a run's local sources. `help` is the first
    sentence of the option's help."""
    help += " Give one for each local source of the run, in their order."
    return typed_option("data", help=help, click_type=EXISTING_PATH)


def own_words(data: Sequence[Path], own: OwnFiles) -> list[str]:
    """Return the options that name `data` and `own`, as words of a command line, with TEXTS and PATH in place of this
    machine's paths."""
    named = [name for name, path in vars(own).items() if path is not None]
    return ["--data", "TEXTS"] * len(data) + [word for name in named for word in (f"--{name}", "PATH")]


def open_dashboard(address: str | None) -> socket.socket | None:
    """Return a socket that listens at `address` (HOST:PORT); None if that is None. Raises: as `bind`."""
    if address is None:
        return None
    from opendiloco.dashboard.server import bind

    return bind(split_address(address))


def show_dashboard(listening: socket.socket | None) -> None:
    """Print the URL of the dashboard on this socket, unless it is None."""
    if listening is not None:
        from opendiloco.dashboard.server import url_of

        click.echo(f"The dashboard is at {url_of(listening)}", err=True)


@contextmanager
def reader(path: Path | None) -> Iterator[Identity]:
    """Yield the key with which to read a run: the one in the file `path`, or a new one. Raises: LocalNetworkError."""
    from opendiloco.volunteer.identity import hold_identity
    from peers.values.identity import Identity

    if path is None:
        yield Identity.generate()
    else:
        with hold_identity(path) as key:
            yield key


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Turn an OSError of the code that writes to `path` into a MachineError with this remedy. If the disk is full, the
    error's remedy is to free space instead."""
    try:
        yield
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror}.", remedy_for(error, remedy)) from error


def refuse_torchrun(environment: Mapping[str, str]) -> None:
    """Raise SettingsError if torchrun has started several processes, because each would be a volunteer on the same
    GPUs."""
    size = environment.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in environment and size != "1":  # WORLD_SIZE alone may be Slurm's or Kubeflow's
        raise SettingsError(
            f"torchrun has started {size} processes (WORLD_SIZE), and each process would become a volunteer.",
            "Run `diloco-peer join` once on each machine, without torchrun: it starts a worker for each GPU.",
        )


def parse_run(run: str, initial_peers: tuple[str, ...], state: Path | None = None) -> Invite:
    """Return an invite to the run that `run`, a run id or an invite, names. The invite has addresses of the run's
    swarm.

    The addresses are those of the invite and of the option; else those of the environment or the configuration file;
    else those that this machine remembers in the `state` folder; else those of a volunteer that runs there; else those
    found in the local network. Raises: ManifestError; UsageError when there are no addresses.
    """
    from peers.values.manifest import Invite

    invite, initial_peers = Invite.parse(run), spelled_out(initial_peers)
    if invite.addresses and not is_typed(click.get_current_context(), "initial_peers"):
        return invite  # without addresses from environment or configuration file: these may be of another swarm
    addresses = tuple(dict.fromkeys((*invite.addresses, *initial_peers)))
    if not addresses:
        from opendiloco.owner.controls import volunteers
        from opendiloco.storage.run_folder import default_state_folder, remembered_addresses

        here = volunteers(state or default_state_folder(), invite.run_id).values()
        addresses = remembered_addresses(invite.run_id, state) or next((one.initial_peers for one in here), ())
        addresses = addresses or _nearby(invite.run_id)
    return Invite(invite.run_id, known_addresses(addresses, "a run id alone contains no address, unlike the invite"))


def _nearby(run_id: str) -> tuple[str, ...]:
    """Return the addresses of a run's peers in the local network, or none if --no-local-network forbids the search."""
    import asyncio

    from peers.network.neighbours import neighbours

    context = click.get_current_context()
    # The environment and the configuration file can set --no-local-network also for commands without this option.
    [option] = join_option("local_network")(lambda: None).__click_params__  # type: ignore[attr-defined]
    if not option.type_cast_value(context, option.consume_value(context, context.params)[0]):
        return ()
    click.echo("No address is known: searching for the run in the local network", err=True)
    return asyncio.run(neighbours(run_id))


def known_addresses(addresses: tuple[str, ...], why: str = "no address of the swarm is known") -> tuple[str, ...]:
    """Return the addresses as multiaddrs. Raises: UsageError, which names ways to get an address, if there is none."""
    if not addresses:
        raise click.UsageError(
            f"{why}: add --initial-peer, or set {INITIAL_PEERS}, or initial_peers in the configuration file. "
            "Organisers publish invites and addresses of bootstrap nodes; `diloco-peer bootstrap` starts your "
            "own swarm and prints its address."
        )
    return spelled_out(addresses)


def spelled_out(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses as multiaddrs. PEER@HOST becomes a /dnsaddr address, which stands for the addresses of the
    node PEER in the DNS entries of HOST."""
    return tuple(NAMED_NODE.sub(r"/dnsaddr/\g<host>/p2p/\g<peer>", address) for address in addresses)
