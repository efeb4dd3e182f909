"""TCP sockets as links need them: tuned for long links, and bound to a port that is known to the other side."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from contextlib import suppress

from peers.errors import LocalNetworkError

CONGESTION_CONTROL = b"bbr"  # loss does not make it give up the link; the kernel says whether we may have it
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES = 15, 5, 3  # seconds, seconds: NATs keep what is used
SILENCE_MS = 20_000  # after which what was sent and not confirmed ends a connection
BACKLOG = 512
CALLERS = (socket.AF_INET, socket.AF_INET6)


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of "1.2.3.4:5" or "[::1]:5". Raises: ValueError."""
    host, _, port = endpoint.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def endpoint_of(host: str, port: int) -> str:
    """Return "1.2.3.4:5" or "[::1]:5"; an IPv4 address in IPv6 form is written as what it is."""
    host = host.removeprefix("::ffff:") if "." in host else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def endpoint_of_peer(sock: socket.socket) -> str:
    """Return where the other end of a connection is."""
    host, port, *_ = sock.getpeername()
    return endpoint_of(host.partition("%")[0], port)


def listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Listen on one port of all these addresses. Raises: LocalNetworkError."""
    listeners: list[socket.socket] = []
    try:
        for host in dict.fromkeys(hosts):
            listener = _new_socket(host)
            listeners.append(listener)
            if listener.family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((host, port))
            port = listener.getsockname()[1]
            listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        for listener in listeners:
            listener.close()
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise LocalNetworkError(
            f"data port {port} is in use by another program." if in_use else f"cannot use data port {port}: {error}.",
            "Choose another --data-port, or 0 for any free one.",
        ) from error
    return listeners


async def dial(endpoint: str, timeout: float, local_port: int = 0) -> socket.socket:
    """Connect to an endpoint. `local_port` is the port that the connection comes from; 0: any.

    Raises: OSError, also when nobody answers in time.
    """
    host, port = parse_endpoint(endpoint)
    sock = _new_socket(host)
    try:
        if local_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(("", local_port))
        async with asyncio.timeout(timeout):
            await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except BaseException as error:
        sock.close()
        if isinstance(error, TimeoutError | OverflowError):
            raise OSError(f"no answer from {endpoint}") from error
        raise
    return tune(sock)


def tune(sock: socket.socket) -> socket.socket:
    """Set a connection's options. Those that the kernel lacks are done without."""
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
    with suppress(OSError):  # most kernels let only root choose it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL)
    return sock


def _new_socket(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sock
