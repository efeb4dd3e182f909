"""Endpoints, ports in use, names, and as many open files as the system allows."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket

import pytest

from peers.errors import LocalNetworkError
from peers.network import sockets
from peers.network.sockets import dial, endpoint_of, endpoint_of_peer, listen, parse_endpoint, raise_file_limit
from tests.peers.network.pairs import open_files

DEADLINE = 120.0  # seconds


@pytest.mark.parametrize(
    ("endpoint", "host", "port"), [("1.2.3.4:5", "1.2.3.4", 5), ("[::1]:65535", "::1", 65535), ("name:1", "name", 1)]
)
def test_an_endpoint_is_a_host_and_a_port(endpoint: str, host: str, port: int) -> None:
    assert parse_endpoint(endpoint) == (host, port)
    assert endpoint_of(host, port) == endpoint


def test_an_ipv4_address_is_written_as_one() -> None:
    assert endpoint_of("::ffff:1.2.3.4", 5) == "1.2.3.4:5"


def test_a_port_in_use_is_named_with_a_remedy() -> None:
    before = open_files()
    (first,) = listen(["127.0.0.1"], 0)
    with first, pytest.raises(LocalNetworkError, match="is in use by another program") as caught:
        listen(["127.0.0.2", "127.0.0.1"], first.getsockname()[1])
    assert "--data-port" in caught.value.remedy
    assert open_files() == before


@pytest.mark.parametrize("hosts", [[], ["192.0.2.1"], ["no such host"]], ids=str)
def test_where_one_cannot_listen_is_an_error_of_ours(hosts: list[str]) -> None:
    with pytest.raises(LocalNetworkError, match="cannot use data port"):
        listen(hosts, 0)
    with pytest.raises(LocalNetworkError, match="cannot use data port"):
        listen(["127.0.0.1"], 1 << 16)


def test_addresses_that_this_machine_lacks_are_done_without() -> None:
    """Such as all of IPv6."""
    (listener,) = listen(["192.0.2.1", "127.0.0.1"], 0)
    listener.close()
    listeners = listen(["127.0.0.1", "127.0.0.2", "127.0.0.1"], 0)
    assert len({one.getsockname()[1] for one in listeners}) == 1 < len(listeners) == 2
    for one in listeners:
        one.close()


async def dialled(endpoint: str, local_port: int = 0) -> socket.socket:
    async with asyncio.timeout(DEADLINE):
        return await dial(endpoint, DEADLINE, local_port)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_dialling_an_address_or_a_name(host: str) -> None:
    (listener,) = listen(["127.0.0.1"], 0)
    with listener:
        endpoint = f"{host}:{listener.getsockname()[1]}"
        with asyncio.run(dialled(endpoint)) as sock:
            assert endpoint_of_peer(sock) == f"127.0.0.1:{listener.getsockname()[1]}"
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_dialling_from_a_port() -> None:
    (listener,), (free,) = listen(["127.0.0.1"], 0), listen(["127.0.0.1"], 0)
    port = free.getsockname()[1]
    free.close()
    with listener, asyncio.run(dialled(endpoint_of("127.0.0.1", listener.getsockname()[1]), port)) as sock:
        assert sock.getsockname()[1] == port


async def outcome_of(endpoint: str) -> object:
    return (await asyncio.gather(dialled(endpoint), return_exceptions=True))[0]


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:0", "127.0.0.1:99999999", "999.1.1.1:5", "[:::]:5", f"{'x' * 64}.invalid:5", ":5"]
)
def test_an_endpoint_that_is_none_is_an_error_as_any_other(endpoint: str) -> None:
    before = open_files()
    outcome = asyncio.run(outcome_of(endpoint))
    assert isinstance(outcome, OSError)
    assert open_files() == before


def test_who_gives_up_dialling_leaves_nothing_open() -> None:
    async def scenario() -> None:
        before = open_files()
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            endpoint, waiting = endpoint_of(*full.getsockname()), list[socket.socket]()
            for _ in range(10):  # nobody accepts: when the queue is full, nothing is answered any more
                try:
                    waiting.append(await dial(endpoint, 0.05))
                except OSError:
                    break
            else:
                pytest.fail("all were answered")
            dialling = asyncio.create_task(dial(endpoint, DEADLINE))
            await asyncio.sleep(0)
            dialling.cancel()
            await asyncio.gather(dialling, return_exceptions=True)
            for sock in waiting:
                sock.close()
        assert open_files() == before

    asyncio.run(scenario())


def test_as_many_files_may_be_open_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 4096), (1024, resource.RLIM_INFINITY), (resource.RLIM_INFINITY,) * 2, (1 << 20, 1 << 20)]
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: raised.append(limit))
    results = []
    for limit in limits:
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: limit)
        results.append(raise_file_limit())
    assert results == [4096, sockets.FILES, sockets.FILES, 1 << 20]
    assert raised == [(4096, 4096), (sockets.FILES, resource.RLIM_INFINITY)]


def test_kinds_of_addresses_that_a_machine_may_lack_are_known_by_their_errors() -> None:
    assert errno.EAFNOSUPPORT in sockets.NOT_HERE
    assert errno.EADDRINUSE not in sockets.NOT_HERE
