"""TCP sockets for links: tuned for long distances, and if needed bound to a port that the other side knows."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from peers.errors import InUseError, LocalNetworkError

CONGESTION_CONTROL = b"bbr"  # an algorithm that keeps its rate in spite of lost packets; the kernel may forbid it
# TCP keepalive, since NATs drop idle connections: seconds without data before the first probe, seconds between probes,
# and unanswered probes after which the connection counts as dead.
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES = 15, 5, 3
SILENCE_MS = 40_000  # milliseconds after which unacknowledged bytes end a connection; streams time out earlier
CAN_DIAL_TIMEOUT = 3.0  # seconds to wait for a connection, as a firewall may drop our packets
BACKLOG = 512  # connections waiting to be accepted, at most: hundreds of peers may dial a node that has just started
FILES = 1 << 16  # open files of this process, at most
NOT_HERE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # errors of `listen` at an address that this machine does not have


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Return the host and the port of an endpoint such as "1.2.3.4:5" or "[::1]:5". Raises: ValueError."""
    host, _, port = endpoint.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def endpoint_of(host: str, port: int) -> str:
    """Return the endpoint of a host and port, such as "1.2.3.4:5" or "[::1]:5"; "::ffff:1.2.3.4" becomes IPv4."""
    host = host.removeprefix("::ffff:") if "." in host else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def endpoint_of_peer(sock: socket.socket) -> str:
    host, port, *_ = sock.getpeername()
    return endpoint_of(host.partition("%")[0], port)


@contextmanager
def closed_on_failure(sock: socket.socket) -> Iterator[None]:
    """Close the socket if the body raises an exception."""
    try:
        yield
    except BaseException:
        sock.close()
        raise


def raise_file_limit() -> int:
    """Raise this process's limit of open files, which include connections, as far as allowed. Return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return FILES if soft == resource.RLIM_INFINITY else soft


def listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Return sockets that listen at one port of each of the `hosts` that is an address of this machine.

    Raises: LocalNetworkError.
    """
    listeners: list[socket.socket] = []
    failure = OSError("there is no address to listen at")
    try:
        for host in dict.fromkeys(hosts):
            try:
                listeners.append(socket.create_server((host, port), family=_family_of(host), backlog=BACKLOG))
            except OSError as error:
                if error.errno not in NOT_HERE:
                    raise
                failure = error
                continue
            listeners[-1].setblocking(False)
            port = listeners[-1].getsockname()[1]
        if not listeners:
            raise failure
    except (OSError, OverflowError) as error:
        for listener in listeners:
            listener.close()
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise (InUseError if in_use else LocalNetworkError)(
            f"data port {port} is in use by another program." if in_use else f"cannot use data port {port}: {error}.",
            "Choose another --data-port, or 0 for any free one.",
        ) from error
    return listeners


async def dial(endpoint: str, timeout: float, local_port: int = 0) -> socket.socket:
    """Return a socket connected to an endpoint, whose host may be a name. `local_port` is our own port; 0: any.

    Raises: OSError, also when there is no answer in time.
    """
    host, port = parse_endpoint(endpoint)
    failure = OSError(f"{host} has no address")
    try:
        async with asyncio.timeout(timeout):
            for family, address in await _resolve(host, port):
                try:
                    return await _connect(family, address, local_port)
                except OSError as error:
                    failure = error
    except (TimeoutError, OverflowError, UnicodeError) as error:
        raise TimeoutError(f"no answer from {endpoint}") from error
    raise failure


async def can_dial(endpoint: str) -> bool:
    """Return True if a connection to an endpoint can be made within CAN_DIAL_TIMEOUT seconds."""
    with suppress(OSError):
        (await dial(endpoint, CAN_DIAL_TIMEOUT)).close()
        return True
    return False


async def _resolve(host: str, port: int) -> list[tuple[int, Any]]:
    """Return the (family, socket address) pairs of a host, in the order in which the system's resolver prefers them.
    Raises: OSError, OverflowError, UnicodeError."""
    if ":" in host or host.replace(".", "").isdigit():
        return [(_family_of(host), (host, port))]
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]


async def _connect(family: int, address: Any, local_port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    with closed_on_failure(sock):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if local_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(("", local_port))
        await asyncio.get_running_loop().sock_connect(sock, address)
        return tune(sock)


def has_bbr() -> bool:
    """Return True if the kernel lets us use BBR, congestion control that does not take packet loss for a full link."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL)
        return True
    return False


def tune(sock: socket.socket) -> socket.socket:
    """Set the TCP options of a link's socket, BBR only if the kernel allows it. Return the socket. Raises: OSError."""
    sock.setblocking(False)
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS),
    ):
        sock.setsockopt(level, option, value)
    with suppress(OSError):  # most kernels let only root choose BBR
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL)
    return sock


def _family_of(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
