"""The transport over real libp2p daemons on the loopback interface."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest
from prometheus_client import REGISTRY

from peers.errors import (
    DilocoPeerError,
    LocalNetworkError,
    LocalProtocolError,
    ManifestError,
    RemoteProtocolError,
    SwarmUnreachableError,
)
from peers.network import dht_node, introductions
from peers.network.channel import PeerRefusedError, PeerUnreachableError, RefusalError
from peers.network.contacts import Contact
from peers.network.daemon import NETWORK_ERRORS, sweep_sockets, to_peer_id
from peers.network.dht_storage import heartbeats_key
from peers.network.links import LinkSettings
from peers.network.throttle import Caps
from peers.network.transport import PROTOCOL_PREFIX, HivemindTransport
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest
from peers.values.wire import MESSAGE_LIMIT, Buffer, Reach
from tests.child_processes import child_processes
from tests.peers.network.test_chunk_streams import Inbox, Outbox

pytestmark = pytest.mark.swarm

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
TIMEOUT = 30.0  # seconds for one exchange; milliseconds on an idle machine
RUN = "tiny-" + "a" * 32
T = TypeVar("T")


@asynccontextmanager
async def swarm(size: int, identities: Sequence[Identity] = ()) -> AsyncIterator[list[HivemindTransport]]:
    """Nodes that know each other through the first one; afterwards nothing of them is left. The last of them have
    these identities."""
    nodes: list[HivemindTransport] = []
    anybody = [Identity.generate() for _ in range(size - len(identities))]
    try:
        for identity in (*anybody, *identities):
            known = nodes[0].addresses if nodes else ()
            nodes.append(await HivemindTransport.create(identity, known, LOOPBACK))
        yield nodes
    finally:
        for node in nodes:
            await node.close()
        for node in nodes:
            assert_gone(node)


def assert_gone(node: HivemindTransport) -> None:
    assert not Path(f"/proc/{node.daemon._child.pid}").exists()
    assert not Path(node.daemon._daemon_listen_maddr["unix"]).exists()
    assert not Path(node.daemon._client_listen_maddr["unix"]).exists()


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def eventually(condition: Callable[[], Awaitable[T]], why: str, seconds: float = 8 * TIMEOUT) -> T:
    """The first true result of `condition`, asked again and again."""
    try:
        async with asyncio.timeout(seconds):
            while not (result := await condition()):
                await asyncio.sleep(0.05)
            return result
    except TimeoutError:
        raise AssertionError(f"after {seconds} s: {why}") from None


def heartbeat(identity: Identity, sequence: int, **changes: object) -> Heartbeat:
    fields: dict[str, object] = {
        "run": RUN,
        "peer": identity.peer_id,
        "incarnation": 0,
        "sequence": sequence,
        "state": PeerState.TRAINING,
        "index": 0,
        "head": bytes(32),
        "state_digest": bytes(32),
        "lineage_tokens": 0,
        "inner_step": 0,
        "tokens_per_second": 0.0,
        "speed": 0.0,
        "loss": None,
        "addresses": (),
        "roster_size": 0,
    }
    return Heartbeat.model_validate(fields | changes)


def milliseconds() -> int:
    return int(time.time() * 1000)


@pytest.mark.thorough
def test_daemon_is_the_identity_and_leaves_no_key_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    identity = Identity.generate()

    async def main() -> None:
        node = await HivemindTransport.create(identity, listen=LOOPBACK)
        try:
            assert node.peer_id == identity.peer_id
            assert node.addresses[0].startswith("/ip4/127.0.0.1/tcp/")
            assert node.addresses[0].endswith(f"/p2p/{identity.peer_id}")
            before = node.addresses
            await node.refresh_addresses()
            assert node.addresses == before
            assert os.listdir(tmp_path) == []
        finally:
            await node.close()
        assert_gone(node)

    asyncio.run(main())


@pytest.mark.thorough
def test_manifest_is_found_by_its_run_id_alone() -> None:
    async def main() -> None:
        async with swarm(3) as (_, organiser, volunteer):
            manifest = SignedManifest.create(Identity.generate(), "tiny", {"name": "tiny", "text": "x" * 20_000})
            await organiser.store_manifest(manifest, 60)
            found = await volunteer.find_manifest(manifest.run_id)
            assert found is not None
            assert found.pack() == manifest.pack()
            assert await volunteer.find_manifest(RUN) is None

    asyncio.run(main())


@pytest.mark.thorough
def test_heartbeats_are_seen_by_everybody_and_only_move_forward() -> None:
    async def main() -> None:
        first, second = Identity.generate(), Identity.generate()
        async with swarm(3, (first, second)) as (reader, one, two):
            now = milliseconds()
            assert await one.publish(heartbeat(first, now).sign(first), RUN)
            assert await two.publish(heartbeat(second, now).sign(second), RUN)
            await one.publish(heartbeat(first, now + 1, inner_step=5).sign(first), RUN)

            async def is_seen_by(node: HivemindTransport) -> bool:
                seen = {item.peer: item for item in await node.heartbeats(RUN)}
                return set(seen) == {first.peer_id, second.peer_id} and seen[first.peer_id].inner_step == 5

            for node in (reader, one, two):
                await eventually(lambda node=node: is_seen_by(node), "a peer does not see them")  # type: ignore[misc]
            assert await reader.heartbeats("other-" + "a" * 32) == []
            with pytest.raises(LocalProtocolError):
                await one.publish(heartbeat(first, now).sign(first), RUN)

    asyncio.run(main())


def test_beats_alone_keep_a_peer_heard_and_tell_how_it_gets_on() -> None:
    """They go over links or libp2p, and need no signature."""
    identities = [Identity.generate() for _ in range(2)]

    async def main() -> None:
        async with swarm(3, identities) as (_, *nodes):
            one, other = (node.discovery_of(RUN) for node in nodes)

            async def meet() -> bool:
                for identity, node in zip(identities, nodes, strict=True):
                    await node.publish(heartbeat(identity, milliseconds()).sign(identity), RUN)
                return all(
                    [len(await node.heartbeats(RUN)) == 2 and node.discovery_of(RUN).silences() for node in nodes]
                )

            await eventually(meet, "the peers do not find each other")
            signed = other.beats.store.get(nodes[0].peer_id)
            assert signed is not None
            taken_at = signed.taken_at

            async def beat(step: int = 1) -> bool:
                one.beat(heartbeat(identities[0], milliseconds(), inner_step=step, view=2))
                seen = {item.peer: item for item in await nodes[1].heartbeats(RUN)}[nodes[0].peer_id]
                return (seen.inner_step, seen.view) == (step, 2) and other.silences()[nodes[0].peer_id] < 1.0

            await eventually(beat, "its beats are not heard")
            assert signed.taken_at == taken_at, "nothing else was said"

    asyncio.run(main())


@pytest.mark.thorough
def test_a_stranger_is_told_of_all_peers_though_the_dht_has_only_some() -> None:
    """Whoever looks at a run asks one of its peers who else is in it."""
    identities = [Identity.generate() for _ in range(3)]

    async def main() -> None:
        async with swarm(4, identities) as (reader, *nodes):

            async def all_know_all() -> bool:
                for identity, node in zip(identities, nodes, strict=True):
                    await node.publish(heartbeat(identity, milliseconds()).sign(identity), RUN)
                return all([len(await node.heartbeats(RUN)) == len(nodes) for node in nodes])

            await eventually(all_know_all, "the peers do not find each other")
            one = await reader.dht.find_heartbeats(RUN)

            async def find_one(run_id: str) -> list[bytes]:
                return one[:1]

            reader.dht.find_heartbeats = find_one  # type: ignore[method-assign]
            seen = await reader.heartbeats(RUN)
            assert {item.peer for item in seen} == {identity.peer_id for identity in identities}
            assert reader.peer_id not in {item.peer for node in nodes for item in await node.heartbeats(RUN)}

    asyncio.run(main())


@pytest.mark.thorough
def test_a_frozen_node_makes_nobody_deaf() -> None:
    """Regression: a beat that is cut off while it waits for a silent node never learns that the node is silent."""
    expiry = 3.0  # at which beats are cut off; less than node.DHT_WAIT

    async def main() -> None:
        identity, silent = Identity.generate(), Identity.generate()

        async def beat(speaker: HivemindTransport, listener: HivemindTransport) -> list[Heartbeat]:
            with suppress(TimeoutError):
                async with asyncio.timeout(expiry):
                    await speaker.publish(heartbeat(identity, milliseconds()).sign(identity), RUN)
                    return await listener.heartbeats(RUN)
            return []

        async with swarm(3, (identity, silent)) as (other, one, frozen):
            for node in (one, other):
                node.dht.expect_answers_within(expiry / 4)
            os.kill(frozen.daemon._child.pid, signal.SIGSTOP)
            try:
                async with asyncio.timeout(2 * TIMEOUT):  # two beats; more, where the machine is busy for a whole one
                    while not await beat(one, other):
                        pass
            finally:
                os.kill(frozen.daemon._child.pid, signal.SIGCONT)

    asyncio.run(main())


def test_nodes_refuse_records_that_do_not_prove_themselves() -> None:
    async def main() -> None:
        victim, forger = Identity.generate(), Identity.generate()
        async with swarm(2) as (node, attacker):
            now = milliseconds()
            key, forged = heartbeats_key(RUN), heartbeat(forger, now)
            store = attacker.dht._node.store
            assert not await store(key, forged.sign(forger), forged.expires, subkey=victim.peer_id)
            assert not await store(key, b"garbage", forged.expires, subkey=victim.peer_id)
            assert not await store(key, forged.sign(forger), forged.expires + 100, subkey=forger.peer_id)
            assert not await store(key, b"garbage", forged.expires)
            assert not await store(b"anything", b"else", forged.expires)
            assert await node.heartbeats(RUN) == []
            assert len(node.dht._node.protocol.storage) == 0

    asyncio.run(main())


def test_calls(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    senders: list[str] = []
    before = REGISTRY.get_sample_value("diloco_peer_dropped_total", {"what": "message"}) or 0.0

    async def echo(sender: str, payload: bytes) -> bytes:
        senders.append(sender)
        return payload[::-1]

    async def refuse(sender: str, payload: bytes) -> bytes:
        raise RefusalError("not today")

    async def drop(sender: str, payload: bytes) -> bytes:
        raise RemoteProtocolError(sender, "a message of another run")

    async def crash(sender: str, payload: bytes) -> bytes:
        raise ZeroDivisionError

    async def hang(sender: str, payload: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def main() -> None:
        # Neither peer was told the other's address: the bootstrap node is all they have in common.
        async with swarm(3) as (_, caller, callee):
            handlers = (("echo", echo), ("refuse", refuse), ("drop", drop), ("crash", crash), ("hang", hang))
            for name, handler in handlers:
                await callee.on_call(name, handler)
            there = callee.peer_id
            assert await caller.call(there, "echo", b"abc", TIMEOUT) == b"cba"
            assert await caller.call(there, "echo", bytes(MESSAGE_LIMIT), TIMEOUT) == bytes(MESSAGE_LIMIT)
            assert senders == [caller.peer_id] * 2
            with pytest.raises(LocalProtocolError):
                await caller.call(there, "echo", bytes(MESSAGE_LIMIT + 1), TIMEOUT)
            with pytest.raises(PeerRefusedError, match="not today"):
                await caller.call(there, "refuse", b"", TIMEOUT)
            with pytest.raises(PeerRefusedError, match="another run"):
                await caller.call(there, "drop", b"", TIMEOUT)
            with pytest.raises(PeerRefusedError, match="internal error"):
                await caller.call(there, "crash", b"", TIMEOUT)
            with pytest.raises(PeerUnreachableError, match="no answer in time") as caught:
                await caller.call(there, "hang", b"", 0.1)
            assert caught.value.peer == there
            for peer_id, name in ((there, "unknown"), (Identity.generate().peer_id, "echo"), ("nobody", "echo")):
                with pytest.raises(PeerUnreachableError):
                    await caller.call(peer_id, name, b"", TIMEOUT)

    asyncio.run(main())
    ours = [record for record in caplog.records if record.name.startswith("peers.")]
    dropped, failed = (one for one in ours if one.levelno >= logging.WARNING or "dropped" in one.getMessage())
    assert dropped.levelname == "INFO"
    assert dropped.getMessage() == f"dropped a drop message: peer {senders[0]}: a message of another run"
    assert failed.levelname == "ERROR"
    assert REGISTRY.get_sample_value("diloco_peer_dropped_total", {"what": "message"}) == before + 1


async def send_chunks(sender: HivemindTransport, peer_id: str, outbox: Outbox, protocol: str = "chunks") -> Outbox:
    """Returns once all are answered."""
    async with sender.stream(peer_id, protocol) as channel, asyncio.timeout(TIMEOUT):
        await outbox.run(channel)
    return outbox


def test_chunks_in_both_directions_at_once() -> None:
    async def main() -> None:
        async with swarm(2) as (left, right):
            inboxes = {node.peer_id: Inbox() for node in (left, right)}
            for node in (left, right):
                await node.on_stream("chunks", inboxes[node.peer_id].receive)
            data = [os.urandom(size) for size in (500_001, 0, 1, *([100_000] * 20))]
            sent = await asyncio.gather(
                send_chunks(left, right.peer_id, Outbox(data)),
                send_chunks(left, right.peer_id, Outbox([b"on another stream"])),
                send_chunks(right, left.peer_id, Outbox(data)),
            )
            assert all(is_taken for outbox in sent for _, is_taken in outbox.answers)
            numbered = [(b"round 1", b"chunk %d" % number, chunk) for number, chunk in enumerate(data)]
            assert inboxes[left.peer_id].received == [(right.peer_id, *chunk) for chunk in numbered]
            assert sorted(inboxes[right.peer_id].received) == sorted(
                (left.peer_id, *chunk) for chunk in [*numbered, (b"round 1", b"chunk 0", b"on another stream")]
            )
            with pytest.raises(PeerUnreachableError, match="not in that round"):
                await send_chunks(left, right.peer_id, Outbox(data, b"round 2"))
            with pytest.raises(PeerUnreachableError):
                await send_chunks(left, right.peer_id, Outbox(data), "unknown")
            await eventually(lambda: nobody_is_served(left, right), "a stream that has ended is still served")

    asyncio.run(main())


async def linked(*nodes: HivemindTransport) -> None:
    """Have each know of the others where their bulk connections are dialled, and wait until all links are up."""
    contacts = {node.peer_id: Contact(node.peer_id, node.endpoints) for node in nodes}
    for node in nodes:
        node.links.observe(contacts, eagerly=True)
    for node in nodes:
        await eventually(lambda node=node: are_open(node, len(nodes) - 1), "there is a way to all")  # type: ignore[misc]


async def has_been_seen(node: HivemindTransport) -> bool:
    return bool(node.links.arranging.seen)


async def are_open(node: HivemindTransport, count: int) -> bool:
    return list(node.links.reach().values()) == [Reach.OPEN] * count


@pytest.mark.thorough
def test_in_a_large_run_a_peer_is_dialled_when_there_is_something_to_say_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.network.transport.EAGER", 1)
    identities = [Identity.generate() for _ in range(2)]

    async def echo(sender: str, payload: bytes) -> bytes:
        return payload

    async def main() -> None:
        async with swarm(3, identities) as (_, left, right):
            await right.on_call("echo", echo)
            said = heartbeat(identities[1], milliseconds(), addresses=right.addresses)
            await right.publish(said.sign(identities[1]), RUN)
            await left.publish(heartbeat(identities[0], milliseconds()).sign(identities[0]), RUN)
            dialled: list[str] = []
            connect = left.daemon.connect

            async def count(peer_id: str, addresses: Sequence[str], timeout: float = TIMEOUT) -> bool:
                dialled.append(peer_id)
                return await connect(peer_id, addresses, timeout)

            monkeypatch.setattr(left.daemon, "connect", count)

            async def knows() -> bool:
                return len(await left.heartbeats(RUN)) == 2

            await eventually(knows, "the DHT has both")
            assert dialled == []
            assert await left.call(right.peer_id, "echo", b"hello", TIMEOUT) == b"hello"
            assert dialled == [right.peer_id]

    asyncio.run(main())


def test_where_there_is_a_link_everything_goes_over_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """libp2p's daemon is not asked for anything. What a peer does not serve, or not yet, is nothing to warn of: others
    go on to talk to one that starts again."""

    async def echo(sender: str, payload: bytes) -> bytes:
        if payload == b"no":
            raise RefusalError("not that")
        return sender.encode() + payload

    @asynccontextmanager
    async def serve(sender: str, header: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        yield sender.encode(), b"data"

    async def never(*arguments: object) -> None:
        pytest.fail("that went over libp2p")

    async def main() -> None:
        async with swarm(2) as (left, right):
            for node in (left, right):
                assert node.endpoints
                await node.on_stream("chunks", Inbox().receive)
                await node.on_call("echo", echo)
                await node.on_pull("snapshot", serve)
            await linked(left, right)
            for node in (left, right):
                monkeypatch.setattr(node.daemon, "call_binary_stream_handler", never)
                monkeypatch.setattr(node.daemon._client, "call_unary_handler", never)
            for here, there in ((left, right), (right, left)):
                outbox = await send_chunks(here, there.peer_id, Outbox([os.urandom(500_000)] * 8))
                assert all(is_taken for _, is_taken in outbox.answers)
                assert await here.call(there.peer_id, "echo", b"!", TIMEOUT) == here.peer_id.encode() + b"!"
                with pytest.raises(PeerRefusedError, match="not that"):
                    await here.call(there.peer_id, "echo", b"no", TIMEOUT)
                header, data = await here.pull(there.peer_id, "snapshot", b"", 1000, TIMEOUT)
                assert (header, bytes(data)) == (here.peer_id.encode(), b"data")
                with pytest.raises(PeerUnreachableError):
                    await send_chunks(here, there.peer_id, Outbox([b"data"]), "unknown")
                with pytest.raises(PeerRefusedError, match="this peer does not handle 'unknown', or not yet"):
                    await here.call(there.peer_id, "unknown", b"", TIMEOUT)
                await send_chunks(here, there.peer_id, Outbox([b"data"]))

    asyncio.run(main())
    assert not caplog.records


@pytest.mark.thorough
def test_when_a_link_breaks_libp2p_is_used_until_it_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        introductions, "LOOK_INTERVAL", 1000.0
    )  # seconds: until then nobody looks for who introduces it

    async def echo(sender: str, payload: bytes) -> bytes:
        return payload

    async def main() -> None:
        async with swarm(2) as (left, right):
            await right.on_stream("chunks", Inbox().receive)
            await right.on_call("echo", echo)
            await linked(left, right)
            # A look at its bootstrap node that is still under way would link it again.
            await eventually(lambda: has_been_seen(right), "the right one knows how the left one sees it")
            left.links.observe({}, eagerly=False)  # nobody knows where to dial
            right.links.observe({}, eagerly=False)
            left.links.drop_all()
            assert not left.links.is_up(right.peer_id)
            assert await left.call(right.peer_id, "echo", b"over libp2p", TIMEOUT) == b"over libp2p"
            await send_chunks(left, right.peer_id, Outbox([b"data"]))
            assert not left.links.is_up(right.peer_id)
            await linked(left, right)

    asyncio.run(main())


@pytest.mark.thorough
def test_clients_accept_no_bulk_connections() -> None:
    async def main() -> None:
        async with swarm(1) as (node,):
            client = await HivemindTransport.create(Identity.generate(), node.addresses, LOOPBACK, client_mode=True)
            try:
                assert client.endpoints == ()
                await node.on_stream("chunks", Inbox().receive)
                await send_chunks(client, node.peer_id, Outbox([b"data"]))
                assert client.links.reach() == {}
            finally:
                await client.close()
            assert_gone(client)

    asyncio.run(main())


@pytest.mark.thorough
def test_a_data_port_in_use_is_named_and_nothing_is_left() -> None:
    async def main() -> None:
        async with swarm(1) as (node,):
            port = int(node.endpoints[0].rpartition(":")[2])
            with pytest.raises(LocalNetworkError, match=f"data port {port} is in use"):
                await HivemindTransport.create(Identity.generate(), (), LOOPBACK, links=LinkSettings(port=port))

    before = child_processes()
    asyncio.run(main())
    assert child_processes() == before


async def nobody_is_served(*nodes: HivemindTransport) -> bool:
    return not any(node._serving for node in nodes)


def test_caps_hold_for_all_streams_together() -> None:
    rate, size = 4_000_000, 250_000

    async def main() -> None:
        async with swarm(3) as (left, middle, right):
            for node in (middle, right):
                await node.on_stream("chunks", Inbox().receive)
            for capped, caps in ((left, Caps(upload=rate)), (right, Caps(download=rate))):
                capped.cap(caps)
                began = time.monotonic()
                receivers = (middle, right) if capped is left else (right, right)
                senders = (left, left) if capped is left else (left, middle)
                await asyncio.gather(
                    *(
                        send_chunks(sender, receiver.peer_id, Outbox([bytes(size)] * 4))
                        for sender, receiver in zip(senders, receivers, strict=True)
                    )
                )
                assert 8 * size / (time.monotonic() - began) <= 1.15 * rate, "half a second: a burst is a tenth of it"
                capped.cap(Caps())

    asyncio.run(main())


@pytest.mark.thorough
def test_pulls() -> None:
    snapshot = os.urandom(3_000_000)

    @asynccontextmanager
    async def serve(sender: str, header: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        if header != b"latest":
            raise RefusalError("no such snapshot")
        yield b"position", snapshot

    async def main() -> None:
        async with swarm(2) as (donor, joiner):
            await donor.on_pull("snapshot", serve)
            header, data = await joiner.pull(donor.peer_id, "snapshot", b"latest", 1 << 24, TIMEOUT)
            assert (header, bytes(data)) == (b"position", snapshot)
            with pytest.raises(PeerRefusedError, match="no such snapshot"):
                await joiner.pull(donor.peer_id, "snapshot", b"old", 1 << 24, TIMEOUT)
            with pytest.raises(PeerUnreachableError, match="exceeds the limit"):
                await joiner.pull(donor.peer_id, "snapshot", b"latest", 1000, TIMEOUT)

    asyncio.run(main())


def test_garbage_on_a_stream_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    before = REGISTRY.get_sample_value("diloco_peer_dropped_total", {"what": "stream"}) or 0.0

    async def main() -> None:
        async with swarm(2) as (victim, attacker):
            inbox = Inbox()
            await victim.on_stream("chunks", inbox.receive)
            for garbage in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(1000)):
                _, reader, writer = await attacker.daemon.call_binary_stream_handler(
                    to_peer_id(victim.peer_id), f"{PROTOCOL_PREFIX}/chunks"
                )
                writer.write(garbage)
                if garbage:
                    with pytest.raises((*NETWORK_ERRORS, asyncio.IncompleteReadError)):
                        await asyncio.wait_for(reader.readexactly(1), TIMEOUT)
                writer.close()
            await send_chunks(attacker, victim.peer_id, Outbox([b"data"]))
            assert inbox.received == [(attacker.peer_id, b"round 1", b"chunk 0", b"data")]

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    ours = [one for one in caplog.records if one.levelno >= logging.WARNING or "dropped" in one.getMessage()]
    assert all(record.name == "peers.network.transport" for record in ours)
    assert all("dropped a chunks stream: peer " in record.message for record in ours)
    assert len(ours) == 2
    assert REGISTRY.get_sample_value("diloco_peer_dropped_total", {"what": "stream"}) == before + 2


@pytest.mark.thorough
def test_chunks_to_a_peer_that_dies_are_known_to_be_lost() -> None:
    """What it confirmed before counts."""

    async def main() -> None:
        async with swarm(2) as (sender, victim):

            class Mortal(Inbox):
                def arrived(self, peer: str, header: bytes, frame: bytes, data: bytearray) -> bool:
                    if len(self.received) == 3:
                        os.kill(victim.daemon._child.pid, signal.SIGKILL)
                    return super().arrived(peer, header, frame, data)

            await victim.on_stream("chunks", Mortal().receive)
            outbox = Outbox([bytes(500_000)] * 40)
            with pytest.raises(PeerUnreachableError):
                await send_chunks(sender, victim.peer_id, outbox)
            confirmed = [number for number, _ in outbox.answers]
            assert len(confirmed) <= 4
            assert confirmed + outbox.pending == list(range(outbox.given))
            await victim.close()
            sweep_sockets()

    asyncio.run(main())


@pytest.mark.thorough
@pytest.mark.parametrize("moment", [0.0, 0.01, 0.1, 0.2, 0.4])
def test_start_can_be_cancelled_at_any_moment(moment: float) -> None:
    before = child_processes()

    async def start() -> None:
        node = await HivemindTransport.create(Identity.generate(), listen=LOOPBACK)
        await node.close()
        await asyncio.Event().wait()  # a fast machine started and closed it within the moment

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(start(), moment)
        assert child_processes().keys() <= before.keys()

    asyncio.run(main())


@pytest.mark.thorough
@pytest.mark.parametrize("step", ["node", "daemon"])
def test_close_can_be_cancelled_at_any_moment(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the DHT node that never says goodbye nor the daemon that is just ending leaves anything behind."""

    async def main() -> None:
        node = await HivemindTransport.create(Identity.generate(), listen=LOOPBACK)
        ending, reached = node.dht._node if step == "node" else node.daemon, asyncio.Event()
        shutdown = ending.shutdown

        async def watched() -> None:
            reached.set()
            await (asyncio.Event().wait() if step == "node" else shutdown())

        monkeypatch.setattr(ending, "shutdown", watched)
        closing = asyncio.create_task(node.close())
        await asyncio.wait_for(reached.wait(), TIMEOUT)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert_gone(node)

    asyncio.run(main())


@pytest.mark.thorough
def test_connect_is_best_effort() -> None:
    async def main() -> None:
        async with swarm(1) as (node,):
            stranger = await HivemindTransport.create(Identity.generate(), listen=LOOPBACK)
            try:
                assert await node.connect(stranger.peer_id, stranger.addresses)
                assert stranger.peer_id in [str(info.peer_id) for info in await node.daemon.list_peers()]
                assert not await node.connect(Identity.generate().peer_id, stranger.addresses)
                assert not await node.connect(stranger.peer_id, ("nonsense",))
            finally:
                await stranger.close()

    asyncio.run(main())


async def error_of(**options: object) -> DilocoPeerError:
    """The error with which a transport refuses to start."""
    with pytest.raises(DilocoPeerError) as caught:
        await HivemindTransport.create(Identity.generate(), **options)  # type: ignore[arg-type]
    return caught.value


@pytest.mark.thorough
def test_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = f"/ip4/127.0.0.1/tcp/{port}"
        for listen in ((taken,), (*LOOPBACK, taken), (f"/ip4/0.0.0.0/tcp/{port}",)):
            error = asyncio.run(error_of(listen=listen))
            assert isinstance(error, LocalNetworkError)
            assert f"port {port} " in str(error)
            assert error.exit_code == 15


@pytest.mark.thorough
def test_port_of_another_peer_is_in_use() -> None:
    async def main() -> None:
        async with swarm(1) as (node,):
            taken = node.addresses[0].partition("/p2p/")[0]
            assert "in use" in str(await error_of(listen=(taken,)))

    asyncio.run(main())


@pytest.mark.thorough
def test_foreign_address_is_named() -> None:
    error = asyncio.run(error_of(listen=("/ip4/198.51.100.1/tcp/0",), local=True))
    assert isinstance(error, LocalNetworkError)
    assert "198.51.100.1" in str(error)


@pytest.mark.thorough
def test_unreachable_bootstrap_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts connections and knows nothing of libp2p
        silent = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}/p2p/{Identity.generate().peer_id}"
        nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
        for address in (nobody, silent):
            error = asyncio.run(error_of(initial_peers=(address,), listen=LOOPBACK))
            assert isinstance(error, SwarmUnreachableError)
            assert address in str(error)
            assert error.exit_code == 4


def test_the_key_that_answers_in_the_place_of_another_is_named() -> None:
    async def main() -> None:
        async with swarm(1) as (node,):
            other = node.addresses[0].replace(node.peer_id, Identity.generate().peer_id)
            error = await error_of(initial_peers=(other,), listen=LOOPBACK)
            assert isinstance(error, SwarmUnreachableError)
            assert f"another key answers there: {node.peer_id}" in str(error)

    asyncio.run(main())


@pytest.mark.thorough
def test_malformed_addresses_are_named() -> None:
    no_peer_id = "/ip4/127.0.0.1/tcp/4001"
    for options in (
        {"initial_peers": ("nonsense",)},
        {"initial_peers": (no_peer_id,)},
        {"initial_peers": (f"{no_peer_id}/p2p/nobody",)},
        {"listen": ("nonsense",)},
        {"listen": LOOPBACK, "announce": ("nonsense",)},
    ):
        error = asyncio.run(error_of(**options))
        assert isinstance(error, ManifestError)
        assert "nonsense" in str(error) or no_peer_id in str(error)


@pytest.mark.thorough
def test_lost_bootstrap_node_is_greeted_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_node, "LOOK_INTERVAL", 0.1)

    async def main() -> None:
        boot, volunteer = Identity.generate(), Identity.generate()
        old = await HivemindTransport.create(boot, listen=LOOPBACK)
        address = old.addresses[0]
        node = await HivemindTransport.create(volunteer, old.addresses, LOOPBACK)
        try:
            await old.close()
            lost = heartbeat(volunteer, milliseconds())
            await node.publish(lost.sign(volunteer), RUN)
            new = await HivemindTransport.create(boot, listen=(address.partition("/p2p/")[0],))
            try:
                assert new.addresses == (address,)
                seen = await eventually(lambda: new.heartbeats(RUN), "the restarted node never met the volunteer")
                assert seen == [lost]
            finally:
                await new.close()
        finally:
            await node.close()

    asyncio.run(main())


@pytest.mark.thorough
def test_death_of_the_daemon_is_noticed() -> None:
    async def main() -> None:
        node = await HivemindTransport.create(Identity.generate(), listen=LOOPBACK)
        os.kill(node.daemon._child.pid, signal.SIGKILL)
        error = await asyncio.wait_for(node.daemon.failure(), TIMEOUT)
        assert isinstance(error, LocalNetworkError)
        with pytest.raises(PeerUnreachableError):
            await node.call(Identity.generate().peer_id, "echo", b"", 1.0)
        await node.close()
        sweep_sockets()
        assert_gone(node)

    asyncio.run(main())


KILLED = """
import asyncio
from peers.network.transport import HivemindTransport
from peers.values.identity import Identity

async def main():
    node = await HivemindTransport.create(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",))
    await node.on_stream("chunks", lambda channel: channel.refuse("no"))
    print(node.daemon._child.pid, node.daemon._client_listen_maddr["unix"], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_nothing_outlives_a_killed_process() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            daemon, socket_path = process.stdout.readline().split()
        finally:
            process.kill()
    deadline = time.monotonic() + TIMEOUT  # the daemon ends when its control connection breaks: 0.03 to 1.4 s seen
    while alive(int(daemon)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(int(daemon))
    sweep_sockets()
    assert not Path(socket_path).exists()


@pytest.mark.thorough
def test_a_stream_that_is_taken_back_at_once_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a peer that was carried to another network left one for each stream that it had begun."""

    async def main() -> None:
        node = await HivemindTransport.create(Identity.generate(), listen=LOOPBACK)
        try:

            async def never(channel: object) -> None:
                raise AssertionError

            await node.on_stream("never", never)  # from then on there is a socket for it
            path = Path(node.daemon._client_listen_maddr["unix"])

            async def is_there() -> bool:
                return path.exists()

            await eventually(is_there, "nobody listens to the daemon")
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        finally:
            await node.close()

    asyncio.run(main())
    assert "Unhandled exception" not in caplog.text
