"""Options that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from opendiloco.workers.options import WorkerOptions
from peers.links.own_network import everywhere
from peers.links.settings import LinkSettings

if TYPE_CHECKING:
    import socket

    from opendiloco.workers.trackers import Choice
    from peers.values.identity import Identity
    from peers.values.manifest import Invite

INITIAL_PEERS = "DILOCO_INITIAL_PEERS"
"""The environment variable with the addresses that `--initial-peer` has otherwise."""
Command = TypeVar("Command", bound=Callable[..., Any])

FOLDER = click.Path(file_okay=False, path_type=Path)
NEW_FOLDER = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
PATH = click.Path(path_type=Path)


def initial_peers_option(command: Command) -> Command:
    return click.option(
        "--initial-peer",
        "initial_peers",
        multiple=True,
        metavar="MULTIADDR",
        envvar=INITIAL_PEERS,
        help="Address of a bootstrap node, or of any peer. May be repeated.  "
        f"[default: those in {INITIAL_PEERS}, separated by spaces]",
    )(command)


def other_nodes_option(command: Command) -> Command:
    """The same for a node that others name in `INITIAL_PEERS`. The variable does not count, lest it look for itself."""
    return click.option(
        "--initial-peer",
        "initial_peers",
        multiple=True,
        metavar="MULTIADDR",
        help="Address of another bootstrap node, or of any peer. May be repeated.",
    )(command)


def run_option(command: Command) -> Command:
    return click.option("--run", required=True, metavar="ID|INVITE", help="The run's id, or an invite to it.")(command)


@dataclass(frozen=True)
class Place:
    """Where a model is to come from: the peers of a run, or a checkpoint."""

    run: str | None
    initial_peers: tuple[str, ...]
    identity: Path | None
    source: Path | None
    at: int | None
    manifest: Path | None

    def check(self) -> None:
        """Raises: UsageError unless these options go together."""
        if (self.run is None) == (self.source is None):
            raise click.UsageError("say where the model is to come from, with either --run or --from.")
        if self.source is None and (self.at is not None or self.manifest is not None):
            raise click.UsageError("--at and --manifest choose a checkpoint: give its folder, too, with --from.")

    def invite(self) -> Invite:
        """Return the run, where it is its peers. Raises: see `parse_run`."""
        assert self.run is not None
        return parse_run(self.run, self.initial_peers)


def place_options(command: Command) -> Command:
    """Those of a `Place`, which the command gets as one argument: `place`."""

    @functools.wraps(command)
    def with_place(*arguments: Any, **values: Any) -> Any:
        own = {field.name: values.pop(field.name) for field in fields(Place)}
        return command(*arguments, place=Place(**own), **values)

    wrapped: Any = with_place
    run = "The run's id, or an invite to it: take the newest state of its peers."
    for option in (
        click.option("--manifest", type=FILE, help="With --from: the run's signed manifest.  [default: beside it]"),
        click.option(
            "--at", type=click.IntRange(min=0), metavar="N", help="With --from: the model after N outer steps."
        ),
        click.option("--from", "source", type=PATH, help="Take a checkpoint: its file, or the newest in a folder."),
        reader_option,
        initial_peers_option,
        click.option("--run", metavar="ID|INVITE", help=run),
    ):
        wrapped = option(wrapped)
    return cast(Command, wrapped)


def ticket_option(command: Command) -> Command:
    return click.option(
        "--ticket",
        metavar="TICKET|FILE",
        help="What admits this machine to a run by invitation; needed once, then kept with what else --state keeps.",
    )(command)


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


def limit_option(direction: str, verb: str) -> Callable[[Command], Command]:
    return click.option(
        f"--{direction}-limit",
        type=click.FloatRange(min=0, min_open=True),
        metavar="MBIT",
        help=f"{verb} model data at no more than so many megabits a second.",
    )


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
    help="Serve metrics for Prometheus, and /healthz, on 127.0.0.1, port N; 0 is any free one.",
)


def parse_address(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, int] | None:
    """Split HOST:PORT, an IPv6 address in brackets. Raises: BadParameter."""
    if value is None:
        return None
    host, colon, port = value.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not (colon and bare and port.isascii() and port.isdigit() and int(port) < 1 << 16) or (":" in bare) != (
        host != bare
    ):
        raise click.BadParameter(f"{value!r} is no HOST:PORT, such as 127.0.0.1:8080 or [::1]:8080.")
    return bare, int(port)


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


def relay_settings(port: int, megabits: float | None) -> LinkSettings:
    """Return what the options about links say; without megabits a second, nothing is relayed."""
    return LinkSettings(port, None if megabits is None else megabits * 1e6 / 8)


def parse_trackers(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[Choice, ...]:
    from opendiloco.workers.trackers import Choice

    try:
        return tuple(Choice.parse(value) for value in values)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


track_option = click.option(
    "--track",
    multiple=True,
    callback=parse_trackers,
    metavar="KIND:TARGET",
    help="Draw curves of this machine's training: tensorboard:FOLDER or wandb:PROJECT. May be repeated.",
)


def worker_options(command: Command) -> Command:
    """Those of the workers, which the command gets as one argument: `workers`, a `WorkerOptions`."""

    @functools.wraps(command)
    def with_options(*arguments: Any, **values: Any) -> Any:
        own = {field.name: values.pop(field.name) for field in fields(WorkerOptions) if field.name in values}
        return command(*arguments, workers=WorkerOptions(**own), **values)

    wrapped: Any = with_options
    for option in reversed(WORKER_OPTIONS):
        wrapped = option(wrapped)
    return cast(Command, wrapped)


WORKER_OPTIONS = (
    click.option(
        "--device",
        default="auto",
        show_default=True,
        help="auto (all GPUs, or the CPU), cpu, cuda (all GPUs), or one: cuda:1 and so on.",
    ),
    click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="Train on the first N GPUs.  [default: all]"),
    click.option(
        "--cpu-workers",
        type=click.IntRange(min=1),
        metavar="N",
        default=1,
        show_default=True,
        help="Share the work among N processes, where it is the CPU that trains.",
    ),
    click.option(
        "--threads",
        type=click.IntRange(min=1),
        metavar="N",
        help="CPU threads of each worker.  [default: on the CPU all cores but one, on GPUs 1]",
    ),
    click.option(
        "--restarts",
        type=click.IntRange(min=0),
        metavar="N",
        default=3,
        show_default=True,
        help="Start workers anew that died or failed, up to N times in a row.",
    ),
    click.option(
        "--micro-batch",
        type=click.IntRange(min=1),
        metavar="N",
        help="Put N windows through the model at once, for less memory.  [default: what fits, up to what the run says]",
    ),
    click.option(
        "--activation-checkpointing/--no-activation-checkpointing",
        default=None,
        help="Compute activations again instead of keeping them: less memory, more time.  [default: as the run says]",
    ),
    click.option(
        "--compile/--no-compile",
        default=None,
        help="Compile the model's blocks with torch.compile, or do not.  [default: on GPUs, yes; on the CPU, no]",
    ),
    click.option(
        "--tf32", is_flag=True, help="Let GPUs multiply in TF32 where the run says fp32: faster, 10 bits instead of 23."
    ),
    click.option(
        "--whole-layers",
        is_flag=True,
        help="Several GPUs: keep layers whole between passes; less traffic, 8 bytes more a parameter on each.",
    ),
    click.option(
        "--replicas",
        type=click.IntRange(min=1),
        metavar="N",
        default=1,
        show_default=True,
        help="Divide the workers into N groups, each of which shares a whole model. One for each machine is HSDP.",
    ),
)


@contextmanager
def reader(path: Path | None) -> Iterator[Identity]:
    """The key of this file, or a new one, to look at a run with. Raises: LocalNetworkError."""
    from opendiloco.identity_file import hold_identity
    from peers.values.identity import Identity

    if path is None:
        yield Identity.generate()
    else:
        with hold_identity(path) as key:
            yield key


def parse_run(run: str, initial_peers: tuple[str, ...]) -> Invite:
    """Return the run and the addresses for it: those of the invite and of the option, or else of the environment.

    Raises: ManifestError; UsageError when there are no addresses.
    """
    from peers.values.manifest import Invite

    invite = Invite.parse(run)
    source = click.get_current_context().get_parameter_source("initial_peers")
    if invite.addresses and source is ParameterSource.ENVIRONMENT:
        return invite  # the variable may be about another swarm
    addresses = tuple(dict.fromkeys((*invite.addresses, *initial_peers)))
    if not addresses:
        raise click.UsageError(
            f"a run id does not say where the swarm is: add --initial-peer, set {INITIAL_PEERS}, or give the invite."
        )
    return Invite(invite.run_id, addresses)
