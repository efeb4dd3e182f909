"""One pair's connections: used again after a clean end, never after another, and more of them where they are needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from peers.errors import RemoteProtocolError
from peers.network import link as links_link
from peers.network.channel import STALL_TIMEOUT, Channel, PeerRefusedError, PeerUnreachableError, RefusalError
from peers.network.connection import Connection, Credentials
from peers.network.link import CALLS, CONNECTIONS, DIAL_PAUSE, OPEN_TIMEOUT, Link, answer_calls
from peers.network.throttle import UNLIMITED
from peers.values.identity import Identity
from peers.values.wire import Reach
from tests.peers.network.pairs import connected, credentials_of, opened_by_them
from tests.peers.network.test_throttle import now, simulate

US, THEM = credentials_of("us"), credentials_of("them")


class Pair:
    """Our link and theirs. `made` are our ends of the connections that there ever were."""

    def __init__(self) -> None:
        self.made: list[Connection] = []
        self.dials: list[int] = []
        self.can_dial = True
        self.served: list[tuple[str, bytes]] = []
        self.tasks: list[asyncio.Future[None]] = []
        self.changes = 0
        self.ours = self._link(THEM.peer_id, self.dial_more)
        self.theirs = self._link(US.peer_id, self.dial_more)

    def _link(self, peer: str, dial_more: Callable[[int], Awaitable[None]]) -> Link:
        return Link(peer, self.serve, dial_more, self.start, lambda: (UNLIMITED, UNLIMITED), self.changed)

    def changed(self) -> None:
        self.changes += 1

    def start(self, work: Awaitable[None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def connect(self, is_ours: bool = True, reach: Reach = Reach.OPEN) -> None:
        ours, theirs = await connected(US, THEM, is_ours, reach)
        self.made.append(ours)
        self.ours.add(ours)
        self.theirs.add(theirs)

    async def dial_more(self, count: int) -> None:
        self.dials.append(count)
        if not self.can_dial:
            raise PeerUnreachableError("them", "refused")
        for _ in range(count):
            await self.connect()

    async def serve(self, protocol: str, channel: Channel) -> None:
        """ "echo" ends properly, "refuse" refuses, "extra" sends a byte too many, "break" raises."""
        if protocol == CALLS:
            await answer_calls(channel, self.answer)
        header, _ = await channel.read_prelude()
        self.served.append((protocol, header))
        if protocol == "refuse":
            await channel.refuse("busy")
        elif protocol == "break":
            raise RemoteProtocolError(channel.peer, "it broke")
        elif protocol == "fail":
            raise ZeroDivisionError
        else:
            await channel.accept()
            if protocol == "extra":
                await channel.accept()

    async def answer(self, sender: str, name: str, payload: bytes) -> bytes:
        if name == "refuse":
            raise RefusalError("no")
        if name == "never":
            await asyncio.Event().wait()
        return name.encode() + payload

    async def say(self, protocol: str, header: bytes = b"") -> None:
        async with self.ours.conversation(protocol) as channel:
            await channel.send_prelude(header, 0)
            await channel.read_verdict()
            channel.is_finished = True

    async def settle(self) -> None:
        await asyncio.sleep(0.001)


@asynccontextmanager
async def pair(connections: int = 2) -> AsyncIterator[Pair]:
    """Messages have the first connection."""
    both = Pair()
    for _ in range(connections):
        await both.connect()
    try:
        async with asyncio.timeout(1000):
            yield both
    finally:
        for task in both.tasks:
            task.cancel()
        outcomes = await asyncio.gather(*both.tasks, return_exceptions=True)
        both.ours.close()
        both.theirs.close()
        await both.settle()
        assert all(one is None or isinstance(one, asyncio.CancelledError) for one in outcomes), outcomes


def test_one_connection_has_one_conversation_after_another() -> None:
    async def scenario() -> None:
        async with pair() as both:
            for number in range(20):
                await both.say("echo", b"%d" % number)
            assert both.served == [("echo", b"%d" % number) for number in range(20)]
            assert (both.dials, len(both.made), both.made[1].is_open) == ([], 2, True)

    simulate(scenario())


def test_a_refusal_ends_a_conversation_and_not_the_connection() -> None:
    async def scenario() -> None:
        async with pair() as both:
            for _ in range(3):
                with pytest.raises(PeerRefusedError, match="busy"):
                    await both.say("refuse")
            await both.say("echo")
            assert len(both.made) == 2

    simulate(scenario())


def test_who_leaves_a_conversation_before_its_end_ends_the_connection() -> None:
    async def scenario() -> None:
        async with pair() as both:
            async with both.ours.conversation("echo") as channel:
                await channel.send_prelude(b"", 0)
            assert not both.made[1].is_open

    simulate(scenario())


def test_another_peers_refusal_within_a_conversation_does_not_end_it_cleanly() -> None:
    async def scenario() -> None:
        async with pair() as both:
            with pytest.raises(PeerRefusedError):
                async with both.ours.conversation("echo"):
                    raise PeerRefusedError("somebody else", "no")
            assert not both.made[1].is_open

    simulate(scenario())


@pytest.mark.parametrize("how", ["an error here", "cancelled here", "an error there", "a failure there"])
def test_a_connection_whose_conversation_broke_is_never_used_again(how: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with pair() as both:
            if how == "an error here":
                with pytest.raises(ZeroDivisionError):
                    async with both.ours.conversation("echo"):
                        raise ZeroDivisionError
            elif how == "cancelled here":
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(1.0), both.ours.conversation("echo") as channel:
                        await channel.read_verdict()
            else:
                with pytest.raises((EOFError, OSError)):
                    await both.say("break" if how == "an error there" else "fail")
            await both.settle()
            assert [one.is_open for one in both.made] == [True, False]
            assert len(both.ours.connections) == len(both.theirs.connections) == 1
            await both.say("echo")
            assert len(both.made) == 3

    with caplog.at_level(logging.INFO):
        simulate(scenario())
    ours = [record for record in caplog.records if record.name.startswith("peers")]
    levels = [one.levelname for one in ours if one.levelno >= logging.WARNING or "dropped" in one.getMessage()]
    assert levels == {"an error there": ["INFO"], "a failure there": ["ERROR"]}.get(how, [])


@pytest.mark.parametrize(
    ("sent", "seconds"), [(b"", OPEN_TIMEOUT), (b"\x04echo", STALL_TIMEOUT)], ids=["name", "prelude"]
)
def test_an_opening_has_a_deadline_however_slowly_it_comes(sent: bytes, seconds: float) -> None:
    async def scenario() -> None:
        async with pair(1) as both:
            [connection] = both.made
            connection.writer.write(sent)

            async def drip() -> None:
                while True:
                    connection.writer.write(b"D")
                    await asyncio.sleep(9.0)

            began, dripping = now(), asyncio.create_task(drip())
            with pytest.raises((asyncio.IncompleteReadError, OSError)):
                await connection.reads.read(1, None)
            dripping.cancel()
            assert seconds <= now() - began < seconds + 1
            await both.settle()

    simulate(scenario())


def test_a_byte_too_many_is_not_taken_for_the_next_conversations() -> None:
    async def scenario() -> None:
        async with pair() as both:
            async with both.ours.conversation("extra") as channel:
                await channel.send_prelude(b"", 0)
                await channel.read_verdict()
                channel.is_finished = True
                await both.settle()
            assert not both.made[1].is_open
            await both.say("extra")
            await both.settle()
            outcome = (await asyncio.gather(both.say("refuse"), return_exceptions=True))[0]
            assert outcome is None or isinstance(outcome, PeerUnreachableError | EOFError | OSError)

    simulate(scenario())


def test_as_many_connections_are_dialled_as_conversations_wait() -> None:
    async def scenario() -> None:
        async with pair() as both, AsyncExitStack() as stack:
            openings = (stack.enter_async_context(both.ours.conversation("echo")) for _ in range(5))
            opened = await asyncio.gather(*openings)
            assert len({id(channel) for channel in opened}) == 5
            assert sum(both.dials) == 4
            assert (both.ours.ours, opened_by_them(both.theirs), opened_by_them(both.ours)) == (6, 6, 0)

    simulate(scenario())


def test_no_more_than_so_many_connections_and_the_rest_wait() -> None:
    async def scenario() -> None:
        async with pair() as both:
            opened, go_on = 0, asyncio.Event()

            async def hold() -> None:
                nonlocal opened
                async with both.ours.conversation("echo") as channel:
                    opened += 1
                    await go_on.wait()
                    await channel.send_prelude(b"", 0)
                    await channel.read_verdict()
                    channel.is_finished = True

            holding = [asyncio.create_task(hold()) for _ in range(CONNECTIONS + 3)]
            await both.settle()
            assert opened + 1 == CONNECTIONS == both.ours.ours
            go_on.set()
            await asyncio.gather(*holding)
            assert len(both.served) == CONNECTIONS + 3
            assert len(both.made) == CONNECTIONS

    simulate(scenario())


def test_dialling_that_fails_is_tried_again_now_and_then_until_the_time_is_over() -> None:
    """Regression: a port that refuses at once was dialled thousands of times."""

    async def scenario() -> None:
        async with pair() as both:
            both.can_dial = False
            async with both.ours.conversation("echo"):
                began = now()
                with pytest.raises(PeerUnreachableError, match="no connection in time"):
                    await both.say("echo")
                assert now() - began == pytest.approx(OPEN_TIMEOUT)
                assert len(both.dials) <= OPEN_TIMEOUT / DIAL_PAUSE + 1
                waiting = asyncio.create_task(both.say("echo"))
                await both.settle()
                both.can_dial = True
                await waiting

    simulate(scenario())


def test_a_connection_that_is_dead_already_makes_no_link() -> None:
    """Regression: nobody tells of an end that came before, and the link was up for ever."""

    async def scenario() -> None:
        async with pair(0) as both:
            ours, theirs = await connected(US, THEM)
            theirs.close()
            with suppress(asyncio.IncompleteReadError):
                await ours.reads.read(1, None)
            both.ours.add(ours)
            assert not both.ours.is_up
            assert both.ours.reach is Reach.NONE

    simulate(scenario())


def test_of_too_many_of_theirs_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be of a machine that lost its power, and came back."""
    monkeypatch.setattr(links_link, "CONNECTIONS", 3)

    async def scenario() -> None:
        async with pair(0) as both:
            for _ in range(4):
                await both.connect(is_ours=False)
            assert [one.is_open for one in both.made] == [False, True, True, True]
            assert opened_by_them(both.ours) == 3
            ends = [await connected(US, THEM) for _ in range(4)]
            for ours, _ in ends:
                both.ours.add(ours)
            assert [ours.is_open for ours, _ in ends] == [True, True, True, False], "there is no use for it"
            for _, theirs in ends:
                theirs.close()

    simulate(scenario())


def test_the_best_way_of_all_connections_counts() -> None:
    async def scenario() -> None:
        async with pair(0) as both:
            assert both.ours.reach is Reach.NONE
            for reach in (Reach.RELAYED, Reach.PUNCHED, Reach.OPEN):
                waiting = asyncio.create_task(both.ours.wait_for(lambda: both.ours.is_up, 1.0))
                await both.connect(reach=reach)
                await waiting
                assert both.ours.reach is reach
            both.ours.close()
            assert both.ours.reach is Reach.NONE, "at once"
            began = now()
            await both.ours.wait_for(lambda: both.ours.is_up, 3.0)
            assert now() - began == pytest.approx(3.0)

    simulate(scenario())


# Messages -------------------------------------------------------------------------------------------------------
def test_calls_share_one_conversation() -> None:
    async def scenario() -> None:
        async with pair(1) as both:
            answers = await asyncio.gather(*(both.ours.call("name", b"%d" % number, 5.0) for number in range(50)))
            assert answers == [b"name%d" % number for number in range(50)]
            with pytest.raises(PeerRefusedError):
                await both.ours.call("refuse", b"", 5.0)
            with pytest.raises(PeerUnreachableError, match="no answer in time"):
                await both.ours.call("never", b"", 5.0)
            assert await both.ours.call("again", b"", 5.0) == b"again"
            assert len(both.ours.connections) == len(both.made) == 1

    simulate(scenario())


def test_a_call_fails_when_the_connection_breaks_and_the_next_opens_another() -> None:
    async def scenario() -> None:
        async with pair(1) as both:
            asking = asyncio.create_task(both.ours.call("never", b"", 100.0))
            await both.settle()
            both.made[0].close()
            with pytest.raises(PeerUnreachableError, match=r"broke|closed"):
                await asking
            with pytest.raises(PeerUnreachableError, match="down"):
                await both.ours.call("name", b"", 5.0)
            await both.connect()
            assert await both.ours.call("name", b"", 5.0) == b"name"

    simulate(scenario())


def test_who_gives_up_while_the_conversation_is_opened_spoils_it_for_nobody() -> None:
    async def scenario() -> None:
        async with pair() as both:
            both.can_dial = False
            async with both.ours.conversation("echo") as channel:
                both.made[0].close()
                await both.settle()
                impatient = asyncio.create_task(both.ours.call("name", b"", 1.0))
                patient = asyncio.create_task(both.ours.call("name", b"", 10.0))
                with pytest.raises(PeerUnreachableError, match="no answer in time"):
                    await impatient
                await channel.send_prelude(b"", 0)
                await channel.read_verdict()
                channel.is_finished = True
            assert await patient == b"name"

    simulate(scenario())


def test_a_link_that_is_closed_while_calls_are_opened_cancels_nobody() -> None:
    """Regression: those who waited were cancelled, as if somebody had wanted that."""

    async def scenario() -> None:
        async with pair() as both:
            both.can_dial = False
            async with both.ours.conversation("echo"):
                both.made[0].close()
                await both.settle()
                asking = asyncio.create_task(both.ours.call("name", b"", 10.0))
                await both.settle()
                for task in both.tasks:
                    task.cancel()
                with pytest.raises(PeerUnreachableError, match="closed"):
                    await asking

    simulate(scenario())


@pytest.mark.parametrize("is_ours", [True, False])
def test_what_was_connected_before_the_other_side_moved_is_dead(is_ours: bool) -> None:
    """Regression: nobody says so, and messages went into dead connections for 40 seconds."""

    async def scenario() -> None:
        identity = Identity.generate()
        before, after = Credentials(identity), Credentials(identity)
        pair = Pair()
        old = [await connected(US, before, side) for side in (True, False)]
        for ours, _ in old:
            pair.ours.add(ours)
        assert len(pair.ours.connections) == 2
        new, theirs = await connected(US, after, is_ours)
        pair.ours.add(new)
        assert [ours.is_open for ours, _ in old] == [False, False]
        assert (len(pair.ours.connections), new.is_open) == (1, True)
        pair.ours.close()
        for other in (theirs, *(end for _, end in old)):
            other.close()
        await asyncio.gather(*pair.tasks)

    asyncio.run(scenario())
