"""What a driver says of its own health: that it publishes heartbeats, and that its worker gets on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

import peers.driver.pulse
import peers.driver.training
from peers.driver.driver import Driver
from peers.driver.replication import Replication
from peers.driver.training import STEP_LIMIT, STUCK, Training
from peers.metrics import Health
from peers.protocol.effects import Train
from peers.protocol.events import Captured
from peers.protocol.round import RoundState
from peers.transfer.buffers import PayloadBuffers
from peers.values.chunks import Sum
from peers.values.workload import InnerLoop, OnCaptured, Progress, Trained, captures_nothing
from tests.peers.driver.test_pulse import Network, new_peer, pulse_of
from tests.peers.fakes import Clock, FakeWorkload
from tests.peers.founder import Founder
from tests.peers.logs import SETTINGS, TOKENS
from tests.peers.rounds import CONTRIBUTED

STEP = Progress(inner_step=1, loss=2.0, tokens_per_second=10.0)
REPLICATION = cast(Replication, SimpleNamespace(worker=asyncio.Lock()))


class Worker(FakeWorkload):
    """A worker that does one inner step, and then looks at what is said of it once time has passed."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    async def run_inner_loop(
        self, work: InnerLoop, on_progress: Callable[[Progress], None], on_captured: OnCaptured = captures_nothing
    ) -> Trained:
        on_progress(STEP)
        self._look()
        return Trained((), 0, 2.0)


class Silent:
    def handle(self, event: object) -> None:
        """Nobody listens."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Health:
    health = Health(clock)
    for module in (peers.driver.pulse, peers.driver.training):
        monkeypatch.setattr(module, "HEALTH", health)
    return health


def test_a_peer_that_publishes_no_heartbeat_for_an_expiry_is_ill(health: Health, clock: Clock) -> None:
    pulse = pulse_of(new_peer(), Network())
    asyncio.run(pulse.publish())
    clock.now += SETTINGS.timing.heartbeat_expiry
    assert health.reasons == []
    clock.now += 1
    assert health.reasons == ["no heartbeat was published for 11 seconds"]
    asyncio.run(pulse.publish())
    assert health.reasons == []


def host_with(round: SimpleNamespace, is_late: bool) -> Any:
    """A host whose peer has one round, and trains in time or late."""
    trainer = SimpleNamespace(is_late=lambda log: is_late)
    return SimpleNamespace(
        peer=SimpleNamespace(rounds={0: round}, log=None, trainer=trainer), handle=lambda event: None
    )


def test_a_late_worker_waits_for_no_average(health: Health, clock: Clock) -> None:
    host = host_with(SimpleNamespace(state=RoundState.READY), is_late=True)

    def look() -> None:
        clock.now += STEP_LIMIT + 1
        training.look()
        assert health.reasons == [f"{STUCK} for {STEP_LIMIT + 1:.0f} seconds"]

    workload = Worker(look)
    training = Training(workload, [PayloadBuffers(workload, 0)], REPLICATION, host)
    asyncio.run(training._watched(Train(index=0, samples=(), steps=1, tokens=0)))


def test_a_worker_of_a_run_that_is_over_is_well(health: Health, clock: Clock) -> None:
    """Regression: half an hour after the last outer step a volunteer was ill, and was started again."""

    def rest() -> None:
        training.rest()
        clock.now += 1000 * STEP_LIMIT
        training.look()
        assert health.reasons == []

    workload = Worker(rest)
    host = host_with(SimpleNamespace(state=RoundState.READY), is_late=False)
    training = Training(workload, [PayloadBuffers(workload, 0)], REPLICATION, host)
    asyncio.run(training._watched(Train(index=0, samples=(), steps=1, tokens=0)))


@pytest.mark.parametrize("awaited", [RoundState.READY, RoundState.EXCHANGING, RoundState.DECIDED])
def test_a_worker_that_waits_for_an_average_is_well(awaited: RoundState, health: Health, clock: Clock) -> None:
    """However long that takes, and however long it waits to be applied; from then on it counts anew."""
    seen: list[list[str]] = []
    round = SimpleNamespace(state=awaited)
    host = host_with(round, is_late=False)

    def wait() -> None:
        for _ in range(3):
            clock.now += STEP_LIMIT
            training.look()
            seen.append(health.reasons)
        round.state = RoundState.OPEN
        clock.now += STEP_LIMIT + 1
        training.look()
        seen.append(health.reasons)

    workload = Worker(wait)
    training = Training(workload, [PayloadBuffers(workload, 0)], REPLICATION, host)
    asyncio.run(training._watched(Train(index=0, samples=(), steps=1, tokens=0)))
    assert seen == [[], [], [], [f"{STUCK} for {STEP_LIMIT + 1:.0f} seconds"]]


def test_a_worker_that_waits_for_the_average_of_a_fragment_is_well(health: Health, clock: Clock) -> None:
    """With a real peer, which has given the first of two fragments."""
    rig = Founder(replace(SETTINGS, fragments=2)).training()
    contribution = Sum(CONTRIBUTED.digest, CONTRIBUTED.squares)
    rig.do(Captured(0, Trained((), TOKENS, 1.0, contribution=contribution)))
    assert [round.state for round in rig.peer.rounds.values()] == [RoundState.READY, RoundState.OPEN]
    seen: list[list[str]] = []

    def wait() -> None:
        for _ in range(3):
            clock.now += STEP_LIMIT
            training.look()
            seen.append(health.reasons)

    workload, host = Worker(wait), cast(Driver, SimpleNamespace(peer=rig.peer, handle=lambda event: None))
    training = Training(workload, [PayloadBuffers(workload, 0)], REPLICATION, host)
    asyncio.run(training._watched(Train(index=0, samples=(), steps=1, tokens=0)))
    assert seen == [[]] * 3


def test_a_worker_that_does_no_inner_step_for_long_is_told_of_until_training_ends(health: Health, clock: Clock) -> None:
    seen: list[list[str]] = []

    def look() -> None:
        clock.now += STEP_LIMIT
        seen.append(health.reasons)
        clock.now += 1
        seen.append(health.reasons)

    workload = Worker(look)
    buffers = PayloadBuffers(workload, 0)
    training = Training(workload, [buffers], REPLICATION, cast(Driver, Silent()))
    asyncio.run(training._watched(Train(index=0, samples=(), steps=1, tokens=0)))
    assert seen == [[], [f"{STUCK} for {STEP_LIMIT + 1:.0f} seconds"]]
    assert health.reasons == []
