"""Starting and stopping libp2p's daemon (hivemind's p2pd), with checks before it, and with its failures as our errors.

The daemon's sockets, and its key during the start, lie in a folder that no other user may enter. The daemon ends by
itself soon after this process dies for any reason, since its control connection breaks. After a SIGKILL only the folder
remains; the next start removes it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peers.errors import (
    DilocoPeerError,
    InUseError,
    LocalNetworkError,
    ManifestError,
    RemoteProtocolError,
    SwarmUnreachableError,
    quoted,
)
from peers.network.channel import PeerUnreachableError
from peers.network.contacts import host_of, is_loopback
from peers.network.hivemind_lite import load_hivemind
from peers.network.own_network import network_at
from peers.network.signals import signals_held_back
from peers.presence.heartbeat import ADDRESS_LENGTH
from peers.values.identity import Identity, is_peer_id
from peers.values.system import open_private, start_task, sweep_folders, temporary_folder

logger = logging.getLogger(__name__)

HIVEMIND = load_hivemind()
P2P: Any = HIVEMIND.p2p.P2P
# Errors of the other side, or of the daemon on the way to it.
NETWORK_ERRORS = (OSError, EOFError, TimeoutError, HIVEMIND.p2p.P2PDaemonError, HIVEMIND.p2p.P2PHandlerError)
TEMPORARY_LENGTH = 50  # the path of a unix socket has at most 107 bytes
TEMPORARY = Path(folder if len(folder := tempfile.gettempdir()) <= TEMPORARY_LENGTH else "/tmp")
SOCKETS = "diloco-peer-p2p-"
"""The first part of the names of the sockets' folders."""
START_TIMEOUT = 30.0  # seconds; 0.2 on an idle machine
STOP_TIMEOUT = 5.0  # seconds
REQUEST_TIMEOUT = 5.0  # seconds for one request to the daemon
ADDRESS_LIMIT = 8  # own addresses: as many as a heartbeat has room for
LISTENER = re.compile(r"/(?P<family>ip4|ip6)/(?P<host>[^/]+)/(?P<kind>tcp|udp)/(?P<port>\d+)")
IN_USE = re.compile(r"listen (?:tcp|udp)\d? (?P<where>\S+): bind: address already in use")
NOT_RUNNABLE = re.compile(r"binary|No such file|Permission denied|Exec format error")
AS_CID, AS_HASH = bytes.fromhex("a503280172 00240801"), bytes.fromhex("a50326 00240801")  # prefixes of a peer id
GO_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Threads that p2pd computes on. The other cores are for training; on two cores two threads take a third more time."""
IN_OWN_SESSION = (
    sys.executable,
    "-ISc",
    "import os, sys; os.setsid(); os.environ.setdefault(*sys.argv[1:3]); os.execv(sys.argv[3], sys.argv[3:])",
    "GOMAXPROCS",
    str(GO_THREADS),
)
"""The command that runs p2pd in a session of its own. There it gets neither the Ctrl-C nor the hang-up of our terminal,
which would end it before we can say goodbye. Blocking or ignoring these signals does not help: p2pd resets that."""


class Exposure(StrEnum):
    """The place of a daemon, as seen by peers that want to reach it."""

    LOCAL = "local"
    """On the same machine as all others: no NAT is in between."""
    PUBLIC = "public"
    """Others can dial it. It relays for peers that cannot be dialled."""
    PRIVATE = "private"
    """Behind a NAT: it is reached through the initial peers."""
    UNKNOWN = "unknown"
    """Not known: libp2p's AutoNAT finds out."""


_starting: ContextVar[list[Daemon]] = ContextVar("_starting")
"""The daemons created by a start that then failed: hivemind does not return them, and their end must be awaited."""


class Daemon(P2P):  # type: ignore[misc]  # hivemind has no types
    """hivemind's P2P in a session of its own."""

    opened: ExitStack
    """The folder of its sockets, to be removed at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: tuple[str, ...] = ()
        """The addresses at which others can reach us, from the last `refresh_addresses`."""
        _starting.get([]).append(self)

    @staticmethod
    def _make_process_args(*args: object, **options: object) -> list[str]:
        # With discovery on, libp2p looks for relays among strangers, and asks the trusted ones only minutes later.
        return [*IN_OWN_SESSION, *P2P._make_process_args(*args, **options, relayDiscovery=False)]

    @property
    def is_running(self) -> bool:
        return self._child.returncode is None

    async def failure(self) -> LocalNetworkError:
        """Wait until the daemon has died, and return the error to end with."""
        status = await self._child.wait()
        return LocalNetworkError(f"libp2p's daemon ended unexpectedly (status {status}).", "Start the peer again.")

    async def register(self, registering: Awaitable[object]) -> None:
        """Wait until the daemon has accepted a handler. Raises: LocalNetworkError if it is dead or does not answer."""
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await registering
        except NETWORK_ERRORS as error:
            reason = _message_of(error)
            raise LocalNetworkError(f"libp2p's daemon takes no handler: {reason}.", "Start the peer again.") from error

    async def refresh_addresses(self) -> None:
        """Ask the daemon for our present addresses, loopback last. Raises: LocalNetworkError, NETWORK_ERRORS."""
        try:
            visible = [str(address) for address in await self.get_visible_maddrs(latest=True)]
        except ValueError as error:
            raise LocalNetworkError(
                "libp2p's daemon listens at no address.", "Check the listening addresses and the firewall."
            ) from error
        speakable = [address for address in visible if len(address) <= ADDRESS_LENGTH]  # a relay's may be too long
        self.addresses = tuple(sorted(speakable, key=lambda address: is_loopback(host_of(address)))[:ADDRESS_LIMIT])

    async def connect(self, peer_id: str, addresses: Sequence[str], timeout: float = 10.0) -> bool:
        """Connect to a peer at one of its addresses. Return False if they are malformed or do not answer."""
        try:
            suffix = HIVEMIND.multiaddr.Multiaddr(f"/p2p/{peer_id}")
            parsed = parse_addresses(addresses, needs_peer_id=False)
            async with asyncio.timeout(timeout):
                encoded = [_encode(address.decapsulate(suffix)) for address in parsed]
                await self._client.connect(to_peer_id(peer_id), encoded)
        except (*NETWORK_ERRORS, ManifestError, PeerUnreachableError, ValueError) as error:
            logger.debug("no connection to %s: %r", peer_id, error)
            return False
        return True

    async def drop_connection(self, peer_id: str) -> None:
        """End the connection to a peer that does not answer, so that the next request dials again.

        The daemon itself needs half a minute to notice that this machine, or the peer, is in another network.
        """
        with suppress(*NETWORK_ERRORS, PeerUnreachableError):
            async with asyncio.timeout(REQUEST_TIMEOUT):
                await self._client.disconnect(to_peer_id(peer_id))

    async def connections(self) -> dict[str, list[str]]:
        """Return the peers that the daemon has connections to, dead ones included, and their addresses."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                return {str(peer.peer_id): list(map(str, peer.addrs)) for peer in await self.list_peers()}
        except NETWORK_ERRORS as error:
            logger.debug("no list of connections: %r", error)
            return {}

    async def network_of(self, peer_id: str) -> str:
        """Return the network from which a peer has connected to us; "unknown" if it came through a relay."""
        networks = map(network_at, (await self.connections()).get(peer_id, ()))
        return min(filter(None, networks), default="unknown")


def _encode(address: Any) -> Any:
    """Return a multiaddr as p2pd reads it: hivemind encodes a relay's peer id inside as a CID, p2pd wants a hash."""
    encoded = address.to_bytes().replace(AS_CID, AS_HASH)
    return SimpleNamespace(to_bytes=lambda: encoded)


def parse_addresses(addresses: Sequence[str], needs_peer_id: bool) -> list[Any]:
    """Return the addresses as Multiaddr objects of hivemind. Raises: ManifestError naming the malformed address."""
    parsed = []
    for address in addresses:
        try:
            multiaddress = HIVEMIND.multiaddr.Multiaddr(address)
            if needs_peer_id and not is_peer_id(multiaddress["p2p"]):
                raise ValueError("its peer id is not that of an Ed25519 key")
        except ImportError:
            raise  # a broken installation, not a malformed address
        except Exception as error:  # the parser raises a dozen kinds
            example = "/ip4/203.0.113.5/tcp/31337" + ("/p2p/12D3KooW…" if needs_peer_id else "")
            raise ManifestError(
                f"{quoted(address, 200)} is not a multiaddress.", f"It looks like {example}."
            ) from error
        parsed.append(multiaddress)
    return parsed


def peer_id_of(address: str) -> str:
    """Return the peer at the end of a multiaddr that `parse_addresses` has accepted; it may end in a slash."""
    return address.rstrip("/").rpartition("/")[2]


def to_peer_id(peer_id: str) -> Any:
    """Return hivemind's object for a peer id. Raises: PeerUnreachableError when it is not valid."""
    if not is_peer_id(peer_id):
        raise PeerUnreachableError(peer_id, "it is not a peer id")
    return HIVEMIND.p2p.PeerID.from_base58(peer_id)


@contextmanager
def peer_errors(peer_id: str) -> Iterator[None]:
    """Raise errors on the way to a peer as PeerUnreachableError."""
    try:
        yield
    except RemoteProtocolError as error:
        logger.info("dropped a stream: %s", error)
        raise PeerUnreachableError(peer_id, error.message) from error
    except NETWORK_ERRORS as error:
        raise PeerUnreachableError(peer_id, _message_of(error)) from error


def _message_of(error: Exception) -> str:
    """Return the text of one of NETWORK_ERRORS."""
    return "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


async def start_daemon(
    identity: Identity,
    initial_peers: Sequence[str],
    listen: Sequence[str],
    announce: Sequence[str],
    client_mode: bool,
    exposure: Exposure,
) -> Daemon:
    """Start p2pd as `identity` and connect it to at least one of the initial peers.

    Raises: ManifestError for a malformed address; LocalNetworkError when a port is in use or the daemon does not start;
    SwarmUnreachableError when no initial peer answers.
    """
    parse_addresses(initial_peers, needs_peer_id=True)
    parse_addresses([*listen, *announce], needs_peer_id=False)
    for address in listen:
        require_free_port(address)
    sweep_sockets()
    is_local = exposure is Exposure.LOCAL
    relays = list(initial_peers) if exposure in (Exposure.PRIVATE, Exposure.UNKNOWN) else []
    with ExitStack() as opened:
        try:
            folder = opened.enter_context(temporary_folder(TEMPORARY, SOCKETS))
            key_file = folder / "key"  # deleted when the daemon has read it
            with open(key_file, "wb", opener=open_private) as file:
                file.write(identity.libp2p_private_key())
        except OSError as error:
            raise LocalNetworkError(
                f"cannot make a folder for sockets in {TEMPORARY}: {error.strerror}.", "Name another one with TMPDIR."
            ) from error
        daemon = await _start(
            folder,
            initial_peers=list(initial_peers),
            host_maddrs=list(listen),
            announce_maddrs=list(announce) or None,
            dht_mode="client" if client_mode or exposure is Exposure.PRIVATE else "server",
            identity_path=str(key_file),
            check_if_identity_free=False,
            startup_timeout=START_TIMEOUT,
            idle_timeout=START_TIMEOUT,
            use_relay=not is_local,
            use_auto_relay=bool(relays),
            nat_port_map=not is_local,
            auto_nat=not is_local,
            trusted_relays=relays,
            force_reachability=exposure.value,  # which hivemind ignores unless it is public or private
        )
        key_file.unlink()
        daemon.opened = opened.pop_all()
    control = daemon._client.control
    for task in (control._read_task, control._write_task):
        # Otherwise asyncio prints a traceback for a failed task whose exception is never retrieved.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    control._handler = _until_it_breaks(control._handler)
    return daemon


async def _start(folder: Path, initial_peers: list[str], **options: Any) -> Daemon:
    """Start p2pd with its sockets in `folder`. Raises: LocalNetworkError, SwarmUnreachableError."""
    place: Any = type("Daemon", (Daemon,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/"})  # hivemind reads it of the class
    _starting.set(attempts := list[Daemon]())
    # Signals that ask us to leave reach our children, too. They are held back until p2pd has its own session.
    with signals_held_back():
        starting = start_task(place.create(initial_peers=initial_peers, **options))
        try:
            daemon: Daemon = await asyncio.shield(starting)
            attempts.clear()  # or our context would keep the daemon, and all that has listened to it, for good
            return daemon
        except asyncio.CancelledError:
            await _uninterrupted(_give_up(starting))
            raise
        except (HIVEMIND.p2p.P2PDaemonError, OSError, ValueError) as error:
            for attempt in attempts:
                # Otherwise its end is reported to a closed event loop. It ends by itself. Asked to end just then, it
                # would have asyncio (before 3.12.8) warn of an unknown child.
                if attempt._child is not None:
                    await _uninterrupted(_end(attempt, attempt._child.wait()))
            raise _start_error(str(error), initial_peers) from error


def _until_it_breaks(handler: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Return the handler without asyncio's traceback for a stream that breaks before it begins."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (EOFError, ConnectionError) as error:
            logger.debug("a stream broke: %r", error)
            writer.close()

    return serve


async def _give_up(starting: asyncio.Future[Daemon]) -> None:
    """Await a daemon whose start was cancelled, and end it, since hivemind loses it."""
    with suppress(Exception):
        daemon = await starting
        await _end(daemon, daemon.shutdown())


async def stop_daemon(daemon: Daemon) -> None:
    """End p2pd, and wait until it is gone, even when cancelled meanwhile. Remove its sockets."""
    with daemon.opened:
        await _uninterrupted(_end(daemon, daemon.shutdown()))


async def _end(daemon: Daemon, ending: Awaitable[object]) -> None:
    """Wait until the process is gone; kill it when that takes too long."""
    try:
        async with asyncio.timeout(STOP_TIMEOUT):
            await ending
    except TimeoutError:
        logger.warning("libp2p's daemon did not end in %.0f s and is killed", STOP_TIMEOUT)
        daemon._child.kill()
        await daemon._child.wait()


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Run the work to its end. A cancellation meanwhile is raised afterwards."""
    task = start_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from task.exception()
    task.result()


def sweep_sockets() -> None:
    """Remove the folders that killed processes of ours left behind."""
    sweep_folders(TEMPORARY, SOCKETS)


def require_free_port(address: str) -> None:
    """Raise LocalNetworkError unless the port of a multiaddr is free.

    libp2p shares ports (SO_REUSEPORT), and accepts that only one of several addresses works, so it reports no conflict.
    """
    listener = LISTENER.match(address)
    if listener is None or listener["port"] == "0":
        return
    family = socket.AF_INET if listener["family"] == "ip4" else socket.AF_INET6
    is_tcp = listener["kind"] == "tcp"
    with socket.socket(family, socket.SOCK_STREAM if is_tcp else socket.SOCK_DGRAM) as probe:
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if is_tcp:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger are no conflict
        try:
            probe.bind((listener["host"], int(listener["port"])))
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise _port_in_use(listener["port"], listener["host"]) from error
            raise LocalNetworkError(
                f"cannot listen on {address}: {getattr(error, 'strerror', None) or error}.",
                "Choose an address of this machine and a port from 1024 to 65535, or port 0 for any free one.",
            ) from error


def _start_error(message: str, initial_peers: Sequence[str]) -> DilocoPeerError:
    """Return the error for p2pd's last line, or for a failed attempt to run it."""
    in_use = IN_USE.search(message)
    if in_use is not None:
        host, _, port = in_use["where"].rpartition(":")
        return _port_in_use(port, host)
    if "failed to connect to bootstrap peers" in message:
        return unreachable(initial_peers)
    if NOT_RUNNABLE.search(message):
        return LocalNetworkError(f"libp2p's daemon cannot be run: {message}", "Reinstall hivemind for this platform.")
    return LocalNetworkError(f"libp2p's daemon did not start: {message}.", "Run again with --debug to see more.")


def _port_in_use(port: str, host: str) -> InUseError:
    return InUseError(
        f"port {port} on {host} is in use by another program.",
        "End that program, or choose other ports, such as --listen /ip4/0.0.0.0/tcp/31340 --data-port 31341 (0: any).",
    )


def unreachable(initial_peers: Sequence[str]) -> SwarmUnreachableError:
    """Return the error for bootstrap nodes that do not answer. It names them."""
    return SwarmUnreachableError(
        f"no bootstrap node answered at {', '.join(initial_peers)}.",
        "The address of another node will do, too, or that of a volunteer that others can dial: --initial-peer.",
    )
