"""Options that several commands share."""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from opendiloco.cli.setting_options import is_typed, join_option
from opendiloco.data.own_files import OwnFiles
from opendiloco.errors import SettingsError
from opendiloco.settings.join_settings import split_address
from peers.network.own_network import everywhere

if TYPE_CHECKING:
    import socket

    from opendiloco.run import Run
    from opendiloco.volunteer.local_workload import LocalWorkload
    from opendiloco.volunteer.states import Past
    from peers.values.identity import Identity
    from peers.values.manifest import Invite

INITIAL_PEERS = "DILOCO_INITIAL_PEERS"
"""The environment variable with the addresses that `--initial-peer` has otherwise."""
NAMED_NODE = re.compile(r"^(?P<peer>12D3KooW\w+)@(?P<host>[A-Za-z0-9.-]+)$")
Command = TypeVar("Command", bound=Callable[..., Any])

FOLDER = click.Path(file_okay=False, path_type=Path)
NEW_FOLDER = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
PATH = click.Path(path_type=Path)


initial_peers_option = join_option("initial_peers")
run_option = join_option("run")
local_network_option = join_option("local_network")


def identity_option(whose: str) -> Callable[[Command], Command]:
    """Sign as this peer: the machine's own, unless told otherwise."""
    return join_option("identity", help=f"{whose} key file.")


def state_option(help: str) -> Callable[[Command], Command]:
    return join_option("state", help=help)


def other_nodes_option(command: Command) -> Command:
    """The same for a node that others name in `INITIAL_PEERS`. The variable does not count, lest it look for itself."""
    return click.option(
        "--initial-peer",
        "initial_peers",
        multiple=True,
        metavar="MULTIADDR",
        help="Address of another bootstrap node, or of any peer. May be repeated.",
    )(command)


@dataclass(frozen=True)
class Place:
    """Where a model is to come from: the peers of a run, or a checkpoint."""

    run: str | None
    initial_peers: tuple[str, ...]
    identity: Path | None
    source: Path | None
    at: int | None
    manifest: Path | None
    model: Path | None
    tokenizer: Path | None

    def check(self) -> None:
        """Raises: UsageError unless these options go together."""
        if (self.run is None) == (self.source is None):
            raise click.UsageError("say where the model is to come from, with either --run or --from.")
        if self.source is None and (self.at is not None or self.manifest is not None):
            raise click.UsageError("--at and --manifest choose a checkpoint: give its folder, too, with --from.")

    @property
    def own(self) -> OwnFiles:
        return OwnFiles(self.model, self.tokenizer)

    def invite(self) -> Invite:
        """Return the run, where it is its peers. Raises: see `parse_run`."""
        assert self.run is not None
        return parse_run(self.run, self.initial_peers)


@asynccontextmanager
async def state_at(place: Place, data: Sequence[Path]) -> AsyncIterator[tuple[Run, Past, LocalWorkload]]:
    """The state from there, with a worker that can evaluate, generate and export it. Raises: what getting it raises."""
    if place.source is None:
        from opendiloco.volunteer.states import newest_state

        with reader(place.identity) as key:
            async with newest_state(place.invite(), key, data, place.own) as found:
                yield found
    else:
        from opendiloco.volunteer.states import find_origin, state_of

        origin = find_origin(place.source, place.at, place.manifest, place.own)
        async with state_of(replace(origin, run=origin.run.with_data(data))) as found:
            yield found


def place_options(command: Command) -> Command:
    """Those of a `Place`, which the command gets as one argument: `place`."""

    @functools.wraps(command)
    def with_place(*arguments: Any, **values: Any) -> Any:
        own = {field.name: values.pop(field.name) for field in fields(Place)}
        if own["source"] is not None and not is_typed(click.get_current_context(), "run"):
            own["run"] = None  # the settings name the run that this machine usually joins
        return command(*arguments, place=Place(**own), **values)

    wrapped: Any = with_place
    run = "The run's id, or an invite to it: take the newest state of its peers."
    for option in (
        own_files_options,
        click.option("--manifest", type=FILE, help="With --from: the run's signed manifest.  [default: beside it]"),
        click.option(
            "--at", type=click.IntRange(min=0), metavar="N", help="With --from: the model after N outer steps."
        ),
        click.option("--from", "source", type=PATH, help="Take a checkpoint: its file, or the newest in a folder."),
        reader_option,
        initial_peers_option,
        join_option("run", help=run, required=False),
    ):
        wrapped = option(wrapped)
    return cast(Command, wrapped)


def own_files_options(command: Command) -> Command:
    """Add the options of `OwnFiles`."""
    model = click.option(
        "--model",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        metavar="PATH",
        help="Begin with the model in this folder, where the run's is one that you have to name.",
    )
    tokenizer = click.option(
        "--tokenizer",
        type=click.Path(exists=True, path_type=Path),
        metavar="PATH",
        help="Use this tokenizer, a folder or a tokenizer.json, where the run's is one that you have to name.",
    )
    return model(tokenizer(command))


def data_option(help: str) -> Callable[[Command], Command]:
    return click.option(
        "--data",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        multiple=True,
        metavar="FOLDER",
        help=f"{help} Given for each of the run's sources that is a local folder, in their order.",
    )


def reader_option(command: Command) -> Command:
    return click.option(
        "--identity",
        type=FILE,
        help="Look as the peer with this key file: runs by invitation show themselves to their organiser.",
    )(command)


def listen_option(port: int) -> Callable[[Command], Command]:
    """Listen on this port of all addresses unless told otherwise; 0 is any free one."""
    return click.option(
        "--listen",
        multiple=True,
        metavar="MULTIADDR",
        default=lambda: everywhere(port),
        help="Where to listen; port 0 is any free one. May be repeated.  "
        f"[default: /ip4/0.0.0.0/tcp/{port} and /ip6/::/tcp/{port}]",
    )


def announce_option(command: Command) -> Command:
    return click.option(
        "--announce",
        multiple=True,
        metavar="MULTIADDR",
        help="Tell others these addresses instead of those found. May be repeated.",
    )(command)


def data_port_option(default: int, help: str) -> Callable[[Command], Command]:
    return click.option(
        "--data-port",
        type=click.IntRange(0, 65535),
        metavar="N",
        default=default,
        show_default=True,
        help=help,
    )


metrics_port_option = click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    metavar="N",
    help="Serve metrics for Prometheus, and /healthz, on port N; 0 is any free one.",
)

metrics_host_option = click.option(
    "--metrics-host",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="Serve metrics on this address: by default for this machine alone, 0.0.0.0 for all that reach it.",
)


def parse_address(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, int] | None:
    """Split HOST:PORT, an IPv6 address in brackets. Raises: BadParameter."""
    try:
        return None if value is None else split_address(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


dashboard_option = click.option(
    "--dashboard",
    metavar="HOST:PORT",
    callback=parse_address,
    help="Serve a page that shows the run, such as at 127.0.0.1:8080; port 0 is any free one.",
)


def open_dashboard(address: tuple[str, int] | None) -> socket.socket | None:
    """Begin to listen, and say where; None: nobody wants it. Raises: LocalNetworkError."""
    if address is None:
        return None
    from opendiloco.dashboard.server import bind, url_of

    listening = bind(address)
    click.echo(f"The dashboard is at {url_of(listening)}", err=True)
    return listening


@contextmanager
def reader(path: Path | None) -> Iterator[Identity]:
    """The key of this file, or a new one, to look at a run with. Raises: LocalNetworkError."""
    from opendiloco.volunteer.identity import hold_identity
    from peers.values.identity import Identity

    if path is None:
        yield Identity.generate()
    else:
        with hold_identity(path) as key:
            yield key


def refuse_torchrun(environment: Mapping[str, str]) -> None:
    """Refuse to be one of several processes that torchrun has started: each would be a volunteer, on the same GPUs.

    Raises: SettingsError.
    """
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
    local network says.

    Raises: ManifestError; UsageError when there are no addresses.
    """
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
    [option] = local_network_option(lambda: None).__click_params__  # type: ignore[attr-defined]
    may_ask = context.params.get(option.name)
    if may_ask is None:
        may_ask = option.type_cast_value(context, option.consume_value(context, {})[0])
    if not may_ask:
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
