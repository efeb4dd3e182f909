"""Start and stop of libp2p's daemon (hivemind's p2pd), checks before its start, and our own errors for its failures.

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
    OwnAddressError,
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
# The errors of a request to a remote peer, whether the peer fails or the daemon that forwards the request.
NETWORK_ERRORS = (OSError, EOFError, TimeoutError, HIVEMIND.p2p.P2PDaemonError, HIVEMIND.p2p.P2PHandlerError)
TEMPORARY_LENGTH = 50  # characters of the temporary folder's path, at most: a unix socket's path has at most 107 bytes
TEMPORARY = Path(folder if len(folder := tempfile.gettempdir()) <= TEMPORARY_LENGTH else "/tmp")
SOCKETS = "diloco-peer-p2p-"
"""The first part of the names of the sockets' folders."""
START_TIMEOUT = 30.0  # seconds for the daemon to start; on an idle machine it needs 0.2
STOP_TIMEOUT = 5.0  # seconds for the daemon to end, before it is killed
REQUEST_TIMEOUT = 5.0  # seconds for one request to the daemon, at most
ADDRESS_LIMIT = 8  # addresses of this node in its heartbeats, at most
OWN_ADDRESS = re.compile(r"(?P<place>.*?/(?:tcp/\d+|udp/\d+/quic).*?)(?:/p2p/(?P<peer>[^/]+))*")
LISTENER = re.compile(r"/(?P<family>ip4|ip6)/(?P<host>[^/]+)/(?P<kind>tcp|udp)/(?P<port>\d+)")
IN_USE = re.compile(r"listen (?:tcp|udp)\d? (?P<where>\S+): bind: address already in use")
NOT_RUNNABLE = re.compile(r"binary|No such file|Permission denied|Exec format error")
# The bytes before a peer id in a multiaddr: as hivemind writes them, and as p2pd reads them.
AS_CID, AS_HASH = bytes.fromhex("a503280172 00240801"), bytes.fromhex("a50326 00240801")
GO_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Threads that p2pd computes on. The other cores are for training; on a machine with two cores, p2pd needs a third more
time with two threads than with one."""
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
    """A daemon's reachability for other peers."""

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
    """hivemind's P2P, which runs p2pd in a session of its own."""

    opened: ExitStack
    """The folder of its sockets, to be removed at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: tuple[str, ...] = ()
        """The addresses at which others can reach us, from the last `refresh_addresses`."""
        _starting.get([]).append(self)

    @staticmethod
    def _make_process_args(*args: object, **options: object) -> list[str]:
        # With relayDiscovery, libp2p looks for relays among unknown nodes, and asks trusted relays only minutes later.
        return [*IN_OWN_SESSION, *P2P._make_process_args(*args, **options, relayDiscovery=False)]

    @property
    def is_running(self) -> bool:
        return self._child.returncode is None

    async def failure(self) -> LocalNetworkError:
        """Wait until the daemon's process has ended, and return a LocalNetworkError for the caller to raise."""
        status = await self._child.wait()
        return LocalNetworkError(f"libp2p's daemon ended unexpectedly (status {status}).", "Start the peer again.")

    async def register(self, registering: Awaitable[object]) -> None:
        """Await a handler's registration with the daemon. Raises: LocalNetworkError if the daemon is dead or silent."""
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await registering
        except NETWORK_ERRORS as error:
            reason = _message_of(error)
            raise LocalNetworkError(f"libp2p's daemon takes no handler: {reason}.", "Start the peer again.") from error

    async def refresh_addresses(self) -> None:
        """Fetch our addresses from the daemon into `addresses`, loopback addresses last.

        Raises: LocalNetworkError, NETWORK_ERRORS.
        """
        try:
            visible = [str(address) for address in await self.get_visible_maddrs(latest=True)]
        except ValueError as error:
            raise LocalNetworkError(
                "libp2p's daemon listens at no address.", "Check the listening addresses and the firewall."
            ) from error
        # Leave out addresses that are too long for a heartbeat, as addresses through relays may be.
        speakable = [address for address in visible if len(address) <= ADDRESS_LENGTH]
        self.addresses = tuple(sorted(speakable, key=lambda address: is_loopback(host_of(address)))[:ADDRESS_LIMIT])

    async def connect(self, peer_id: str, addresses: Sequence[str], timeout: float = 10.0) -> bool:
        """Connect to a peer. Return False if no address answers in `timeout` seconds or one is malformed, else True."""
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
        """Close the daemon's connection to a peer that does not answer, so that the next request dials the peer again.

        The daemon itself needs half a minute to notice that this machine, or the peer, is in another network.
        """
        with suppress(*NETWORK_ERRORS, PeerUnreachableError):
            async with asyncio.timeout(REQUEST_TIMEOUT):
                await self._client.disconnect(to_peer_id(peer_id))

    async def connections(self) -> dict[str, list[str]]:
        """Return the addresses of all peers connected to the daemon, including dead peers, by peer id."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                return {str(peer.peer_id): list(map(str, peer.addrs)) for peer in await self.list_peers()}
        except NETWORK_ERRORS as error:
            logger.debug("no list of connections: %r", error)
            return {}

    async def network_of(self, peer_id: str) -> str:
        """Return the network (address prefix) from which a peer is connected to us; "unknown" if through a relay."""
        networks = map(network_at, (await self.connections()).get(peer_id, ()))
        return min(filter(None, networks), default="unknown")


def _encode(address: Any) -> Any:
    """Return an object whose `to_bytes` encodes a multiaddr for p2pd: a relay's id as a hash, not as hivemind's CID."""
    encoded = address.to_bytes().replace(AS_CID, AS_HASH)
    return SimpleNamespace(to_bytes=lambda: encoded)


def parse_addresses(addresses: Sequence[str], needs_peer_id: bool) -> list[Any]:
    """Return addresses as hivemind's Multiaddr objects. Raises: ManifestError naming the first malformed address."""
    parsed = []
    for address in addresses:
        problem = "is not a multiaddress"
        try:
            multiaddress = HIVEMIND.multiaddr.Multiaddr(address)
            if needs_peer_id:
                problem = "lacks the node's peer id, /p2p/12D3KooW…, at its end"
                if not is_peer_id(multiaddress["p2p"]):
                    raise ValueError("not the peer id of an Ed25519 key")
        except ImportError:
            raise  # an ImportError means a broken installation, not a malformed address
        except Exception as error:  # the parser raises a dozen kinds of errors for malformed addresses
            example = "/ip4/203.0.113.5/tcp/31337" + ("/p2p/12D3KooW…" if needs_peer_id else "")
            whole = " If it is an invite's, the invite may be cut off: copy it whole." if needs_peer_id else ""
            raise ManifestError(
                f"{quoted(address, 200)} {problem}.", f"A whole address looks like {example}.{whole}"
            ) from error
        parsed.append(multiaddress)
    return parsed


def own_addresses(addresses: Sequence[str], me: str | None = None) -> list[str]:
    """Return these addresses, which are to be listened on or announced, without a final /p2p/`me`: libp2p adds that.

    Raises: OwnAddressError for an address that is malformed, has no port, or ends in another peer's id.
    """
    own = []
    try:
        parsed = parse_addresses(addresses, needs_peer_id=False)
    except ManifestError as error:
        raise OwnAddressError(error.message, error.remedy) from error
    for address in map(str, parsed):
        match = OWN_ADDRESS.fullmatch(address)
        if match is None:
            raise OwnAddressError(f"{quoted(address, 200)} has no TCP or QUIC port.", f"Write {address}/tcp/31337.")
        if me and match["peer"] not in (None, me):
            raise OwnAddressError(
                f"{quoted(address, 200)} has another node's peer id; the id of this node's key is {me}.",
                f"Write {match['place']}, or name the other key with --identity.",
            )
        own.append(match["place"])
    return own


def peer_id_of(address: str) -> str:
    """Return the peer id at the end of a multiaddr that `parse_addresses` has accepted; a slash may follow the id."""
    return address.rstrip("/").rpartition("/")[2]


def to_peer_id(peer_id: str) -> Any:
    """Return a peer id as hivemind's PeerID object. Raises: PeerUnreachableError if the id is invalid."""
    if not is_peer_id(peer_id):
        raise PeerUnreachableError(peer_id, "it is not a peer id")
    return HIVEMIND.p2p.PeerID.from_base58(peer_id)


@contextmanager
def peer_errors(peer_id: str) -> Iterator[None]:
    """Turn a network error in the `with` block into a PeerUnreachableError for this peer."""
    try:
        yield
    except RemoteProtocolError as error:
        logger.info("dropped a stream of a peer that broke the protocol: %s", error)
        raise PeerUnreachableError(peer_id, error.message) from error
    except NETWORK_ERRORS as error:
        raise PeerUnreachableError(peer_id, _message_of(error)) from error


def _message_of(error: Exception) -> str:
    """Return a text for users that describes one of NETWORK_ERRORS."""
    return "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


async def start_daemon(
    identity: Identity,
    initial_peers: Sequence[str],
    listen: Sequence[str],
    announce: Sequence[str],
    client_mode: bool,
    exposure: Exposure,
) -> Daemon:
    """Start p2pd with this identity, connect it to at least one of the initial peers, and return the daemon.

    Raises: ManifestError for a malformed initial peer; LocalNetworkError when a port is in use or the daemon does
    not start; SwarmUnreachableError when no initial peer answers.
    """
    parse_addresses(initial_peers, needs_peer_id=True)
    for address in listen:
        require_free_port(address)
    sweep_sockets()
    is_local = exposure is Exposure.LOCAL
    relays = list(initial_peers) if exposure in (Exposure.PRIVATE, Exposure.UNKNOWN) else []
    with ExitStack() as opened:
        try:
            folder = opened.enter_context(temporary_folder(TEMPORARY, SOCKETS))
            key_file = folder / "key"  # deleted once the daemon has read the key
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
            force_reachability=exposure.value,  # hivemind ignores values other than public and private
        )
        key_file.unlink()
        daemon.opened = opened.pop_all()
    control = daemon._client.control
    for task in (control._read_task, control._write_task):
        # Retrieve a failed task's exception, or asyncio prints a traceback.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    control._handler = _until_it_breaks(control._handler)
    return daemon


async def _start(folder: Path, initial_peers: list[str], **options: Any) -> Daemon:
    """Start p2pd with its sockets in `folder`, and return it. Raises: LocalNetworkError, SwarmUnreachableError."""
    # hivemind reads the prefix of the sockets' paths from an attribute of the class, so each folder needs a subclass.
    place: Any = type("Daemon", (Daemon,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/"})
    _starting.set(attempts := list[Daemon]())
    # Signals that ask this process to leave also reach its children: hold them back until p2pd has its own session.
    with signals_held_back():
        starting = start_task(place.create(initial_peers=initial_peers, **options))
        try:
            daemon: Daemon = await asyncio.shield(starting)
            attempts.clear()  # otherwise this context variable would keep the daemon in memory for ever
            return daemon
        except asyncio.CancelledError:
            await _uninterrupted(_give_up(starting))
            raise
        except (HIVEMIND.p2p.P2PDaemonError, OSError, ValueError) as error:
            for attempt in attempts:
                # A failed daemon ends by itself. Wait for its end, or asyncio reports the end to a closed event loop.
                # If we terminated it, asyncio (before 3.12.8) would warn of an unknown child process.
                if attempt._child is not None:
                    await _uninterrupted(_end(attempt, attempt._child.wait()))
            raise _start_error(str(error), initial_peers) from error


def _until_it_breaks(handler: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Return a handler that calls `handler`, but closes a broken stream without asyncio's traceback."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (EOFError, ConnectionError) as error:
            logger.debug("a stream broke: %r", error)
            writer.close()

    return serve


async def _give_up(starting: asyncio.Future[Daemon]) -> None:
    """Wait for a daemon whose start was cancelled, and end it, since hivemind does not."""
    with suppress(Exception):
        daemon = await starting
        await _end(daemon, daemon.shutdown())


async def stop_daemon(daemon: Daemon) -> None:
    """End p2pd, wait for its process to exit even if this call is cancelled, and remove the daemon's sockets."""
    with daemon.opened:
        await _uninterrupted(_end(daemon, daemon.shutdown()))


async def _end(daemon: Daemon, ending: Awaitable[object]) -> None:
    """Wait until the daemon's process has exited; kill the process after STOP_TIMEOUT seconds."""
    try:
        async with asyncio.timeout(STOP_TIMEOUT):
            await ending
    except TimeoutError:
        logger.warning("libp2p's daemon did not end in %.0f s and is killed", STOP_TIMEOUT)
        daemon._child.kill()
        await daemon._child.wait()


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, even if this call is cancelled meanwhile; then raise the cancellation."""
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
    """Remove the socket folders that killed processes of diloco-peer have left behind."""
    sweep_folders(TEMPORARY, SOCKETS)


def require_free_port(address: str) -> None:
    """Raise LocalNetworkError unless the port in `address`, a multiaddr at which we are to listen, is free.

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
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lingering old connections do not matter
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
    """Return the error for a failed start of the daemon; `message` is p2pd's last line, or the reason it cannot run."""
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
    """Return the error that tells users that no bootstrap node answered at these addresses."""
    return SwarmUnreachableError(
        f"no bootstrap node answered at {', '.join(initial_peers)}.",
        "Give the address of another node, or of a volunteer that others can dial, in the invite after @ or with "
        "--initial-peer. If there is none, start `diloco-peer bootstrap` on a machine that others can reach, and give "
        "its address.",
    )
