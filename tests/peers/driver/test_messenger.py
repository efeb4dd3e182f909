"""Messages to and from the network: what is none of this run's reaches nobody, and its sender is named."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count
from typing import cast

import msgpack
import pytest

from peers.driver import driver
from peers.driver.driver import CALL, CALL_TIMEOUT, READING_BURST, READING_SHARE, Driver, _Messenger
from peers.errors import LocalProtocolError, RemoteProtocolError
from peers.messages.messages import Inquire, Leaving, Message
from peers.messages.packing import pack_message, unpack_message
from peers.network.channel import PeerRefusedError, PeerUnreachableError, RefusalError
from peers.network.transport import HivemindTransport
from peers.protocol.effects import Send
from peers.protocol.events import Event, Received, Undelivered
from peers.protocol.peer import Peer
from peers.values.wire import MESSAGE_LIMIT, PROTOCOL_VERSION
from tests.peers.builders import at_second
from tests.peers.founder import Founder
from tests.peers.logs import LOG, RUN

MESSAGE = Inquire(position=LOG.position)
PACKED = pack_message(RUN, MESSAGE, None)


class Host:
    """Hears what comes in, and runs what is to be sent."""

    def __init__(self, peer: Peer | None = None) -> None:
        self.peer = peer or Founder().peer
        self.events: list[Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    def handle(self, event: Event) -> None:
        self.events.append(event)

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]


class Wire:
    """Keeps what is called, and fails as it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, bytes, float]] = []
        self.failure: Exception | None = None
        self.revoked = ""
        self.receive: Callable[[str, bytes], Coroutine[None, None, bytes]]

    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        self.calls.append((peer_id, name, payload, timeout))
        if self.failure:
            raise self.failure
        return b""

    def check_admitted(self, run_id: str, peer_id: str) -> None:
        if peer_id in self.revoked:
            raise RefusalError("its ticket was revoked")

    async def on_call(self, name: str, handler: Callable[[str, bytes], Coroutine[None, None, bytes]]) -> None:
        assert name == CALL
        self.receive = handler


def hear(data: bytes) -> list[Event]:
    """What reaches the protocol of these bytes, from a peer named c."""

    async def scenario() -> list[Event]:
        host, wire = Host(), Wire()
        await _Messenger(cast(HivemindTransport, wire), cast(Driver, host)).serve()
        assert await wire.receive("c", data) == b""
        return host.events

    return asyncio.run(scenario())


def test_a_message_reaches_the_protocol_with_its_senders_name() -> None:
    assert hear(PACKED) == [Received("c", MESSAGE)]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (msgpack.packb([PROTOCOL_VERSION + 1, RUN, "inquire", []]), "protocol version"),
        (pack_message("another", MESSAGE, None), "of run 'another', not of 'tiny'"),
        (msgpack.packb([PROTOCOL_VERSION, RUN, "gossip", []]), "unknown kind of message 'gossip'"),
        (msgpack.packb([PROTOCOL_VERSION, RUN, "inquire", ["here", b"", 0]]), "Position.index"),
        (PACKED[:-1], "not msgpack"),
        (bytes(MESSAGE_LIMIT + 1), "exceed the limit"),
    ],
    ids=["version", "run", "kind", "field", "cut off", "too long"],
)
def test_what_is_no_message_of_this_run_is_its_senders_mistake(data: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason) as caught:
        hear(data)
    assert caught.value.peer == "c"


def test_a_revoked_voters_farewell_alone_is_heard() -> None:
    """Regression: without its farewell, a run of two waited for the revoked one, and went on as a minority."""
    host, wire = Host(at_second().peer), Wire()
    wire.revoked, farewell = "az", Leaving(position=LOG.position, incarnation=1, departure=2, signature=bytes(64))

    async def is_heard(sender: str, message: Message) -> bool:
        with suppress(RefusalError):
            await wire.receive(sender, pack_message(RUN, message, None))
        return Received(sender, message) in host.events

    async def scenario() -> None:
        await _Messenger(cast(HivemindTransport, wire), cast(Driver, host)).serve()
        assert "a" in host.peer.log.voters
        assert not await is_heard("a", MESSAGE)
        assert await is_heard("a", farewell)
        assert not await is_heard("z", farewell), "a stranger has no vote that others could wait for"

    asyncio.run(scenario())


def test_a_peer_that_takes_too_much_time_is_not_read_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these messages takes a second. The others are read; strangers, whose names cost nothing, share."""
    seconds, host, wire = count(), Host(at_second().peer), Wire()
    clock = 0.0
    monkeypatch.setattr(driver, "thread_time", lambda: float(next(seconds)))
    monkeypatch.setattr(driver, "now", lambda: clock)

    async def heard(senders: str) -> str:
        """Return those of the senders that are heard."""
        before = len(host.events)
        for sender in senders:
            with suppress(RefusalError):
                await wire.receive(sender, PACKED)
        return "".join(event.sender for event in host.events[before:] if isinstance(event, Received))

    async def scenario() -> None:
        nonlocal clock
        await _Messenger(cast(HivemindTransport, wire), cast(Driver, host)).serve()
        assert await heard(8 * "a" + "c") == int(READING_BURST) * "a" + "c"
        assert await heard("uvwxyz") == "uvwxy"
        clock = 1.0 / READING_SHARE
        assert await heard("aaz") == "az", "so much is regained"

    asyncio.run(scenario())


def test_why_a_peer_refuses_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """It may refuse each message of every second: one that starts again, or a run's that we left."""

    async def scenario() -> None:
        host, wire = Host(), Wire()
        messenger = _Messenger(cast(HivemindTransport, wire), cast(Driver, host))
        for reason in ("not yet", "not yet", "another run", "another run"):
            wire.failure = PeerRefusedError("c", reason)
            messenger.send(Send("c", MESSAGE))
            await asyncio.gather(*host.tasks)

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told == [("INFO", "peer c refused a message: not yet"), ("INFO", "peer c refused a message: another run")]


@pytest.mark.parametrize(
    ("failure", "events"),
    [
        (None, []),
        (PeerUnreachableError("c", "no answer in time"), [Undelivered("c")]),
        (PeerRefusedError("c", "no"), []),
        (LocalProtocolError("too large"), []),
    ],
    ids=["delivered", "unreachable", "refused", "too large"],
)
def test_the_protocol_hears_of_a_peer_that_cannot_be_reached(failure: Exception | None, events: list[Event]) -> None:
    """One that answers, whatever it says, is there."""

    async def scenario() -> None:
        host, wire = Host(), Wire()
        wire.failure = failure
        _Messenger(cast(HivemindTransport, wire), cast(Driver, host)).send(Send("c", MESSAGE))
        await asyncio.gather(*host.tasks)
        [(to, name, payload, timeout)] = wire.calls
        assert (to, name, unpack_message(RUN, payload, None), timeout) == ("c", CALL, MESSAGE, CALL_TIMEOUT)
        assert host.events == events

    asyncio.run(scenario())
