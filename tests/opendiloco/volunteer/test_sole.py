"""A volunteer listens before it speaks, and goes when another machine has its key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from opendiloco.volunteer import identity as module
from opendiloco.volunteer.identity import listen, listening, wait_for_copy
from peers.errors import CopiedKeyError
from peers.network.transport import HivemindTransport
from peers.presence.copies import Copies
from peers.presence.heartbeat import Heartbeat
from peers.protocol.peer import Peer
from tests.peers.presence.test_copies import said
from tests.peers.presence.test_heartbeat import IDENTITY

RUN = "tiny-" + "a" * 32
OURS, THEIRS = 5, 9


class Network:
    """Each look at the run takes two seconds, and may hear something."""

    peer_id = IDENTITY.peer_id

    def __init__(self, monkeypatch: pytest.MonkeyPatch, said_at: Callable[[float], Heartbeat | None]) -> None:
        self.copies = Copies()
        self.seconds = 0.0
        self._said_at = said_at
        monkeypatch.setattr(module, "now", lambda: self.seconds)
        monkeypatch.setattr(module, "LOOK", 0.0)
        monkeypatch.setattr(module, "LOOK_LATER", 0.0)

    def discovery_of(self, run_id: str) -> Network:
        return self

    async def heartbeats(self, run_id: str) -> list[Heartbeat]:
        heard = self._said_at(self.seconds)
        if heard is not None:
            self.copies.hear(heard, self.seconds)
        self.seconds += 2.0
        return []


def as_transport(network: Network) -> HivemindTransport:
    """Return what stands in for a transport, as the one that it stands in for."""
    return cast(HivemindTransport, network)


class Log:
    def __init__(self, *roster: int) -> None:
        self._roster = roster

    def counts(self, peer: str, incarnation: int) -> bool:
        return incarnation in self._roster


def test_nobody_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch, lambda second: None)
    asyncio.run(listen(as_transport(network), RUN))
    assert network.seconds == 2.0


def test_a_former_life_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch, lambda second: said(0.0, THEIRS))
    asyncio.run(listen(as_transport(network), RUN))
    assert 10.0 < network.seconds < 15.0


def test_a_copy_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch, lambda second: said(second, THEIRS))

    async def scenario() -> None:
        async with listening(as_transport(network), RUN) as sole:
            await sole

    with pytest.raises(CopiedKeyError, match=r"another machine, reached at /ip4/\S+ takes part in") as caught:
        asyncio.run(scenario())
    assert caught.value.exit_code == 14
    assert "--identity and a new file" in caught.value.remedy


@pytest.mark.parametrize(
    ("ours", "roster", "goes"),
    [
        (OURS, (), True),
        (2 * THEIRS, (), False),
        (OURS, (OURS,), False),
        (OURS, (THEIRS,), True),
        (2 * THEIRS, (THEIRS,), True),
    ],
    ids=["neither counts, smaller", "neither counts, larger", "we count", "the other counts", "it counts, larger"],
)
def test_of_two_that_began_at_once_one_goes(
    monkeypatch: pytest.MonkeyPatch, ours: int, roster: tuple[int, ...], goes: bool
) -> None:
    network = Network(monkeypatch, lambda second: said(second, THEIRS))

    async def scenario() -> bool:
        peer = cast(Peer, SimpleNamespace(me=IDENTITY.peer_id, incarnation=ours, start=0, log=Log(*roster)))
        waiting = asyncio.create_task(wait_for_copy(as_transport(network), RUN, peer))
        for _ in range(30):
            await network.heartbeats(RUN)
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        waiting.cancel()
        return isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], CopiedKeyError)

    assert asyncio.run(scenario()) == goes
