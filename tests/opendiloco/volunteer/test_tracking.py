"""Tracking a live run: which states are seen, when it begins anew, and that who has another state is named."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from opendiloco.errors import DisagreementError, MachineError
from opendiloco.volunteer.tracking import Audit, Disagreement, Reached, state_for, states_until, unless_failed
from peers.errors import LocalNetworkError, SwarmUnreachableError
from peers.log.header import Position
from peers.presence.heartbeat import PeerState
from peers.values.chunks import digest_of_state
from peers.values.wire import digest_of
from tests.peers.heartbeats import beat
from tests.peers.transfer.test_following import Donor, Run, Swarm

POLL = 0.001  # seconds
LIE = digest_of(b"lie")


def state_of(run: Run, index: int) -> bytes:
    return digest_of_state([run.states[index]])


def says(swarm: Swarm, name: str, run: Run, index: int, digest: bytes | None = None) -> None:
    """A peer's heartbeat after `index` entries of a run."""
    swarm.beats[name] = beat(name, run.logs[index], state_digest=digest or state_of(run, index))


async def track(swarm: Swarm, last: int, audit: Audit | None = None) -> list[Reached | Disagreement]:
    return [news async for news in states_until(lambda _: last, swarm.following, audit or Audit(), POLL)]


def steps(news: list[Reached | Disagreement]) -> list[tuple[int, bool, int]]:
    return [(one.index, one.is_snapshot, one.agreeing) for one in news if isinstance(one, Reached)]


def test_every_state_from_a_snapshot_on_and_who_agrees() -> None:
    async def scenario() -> None:
        swarm, run, audit = Swarm(), Run(5), Audit()
        await swarm.add("a", Donor(run, frozen=2))
        await swarm.add("b", Donor(run, frozen=2))
        says(swarm, "a", run, 5)
        says(swarm, "b", run, 4)
        assert steps(await track(swarm, 5, audit)) == [(2, True, 0), (3, False, 0), (4, False, 1), (5, False, 1)]
        swarm.assert_is_at(run, 5)
        audit.check()

    asyncio.run(scenario())


def test_it_ends_where_it_should() -> None:
    async def scenario() -> None:
        swarm, run = Swarm(), Run(5)
        await swarm.add("a", Donor(run, frozen=2))
        assert [index for index, *_ in steps(await track(swarm, 3))] == [2, 3]
        assert [index for index, *_ in steps(await track(swarm, 0))] == [2], "which is past the end already"

    asyncio.run(scenario())


def test_nobody_is_there_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """At first, and again in between; it is said once each time."""
    caplog.set_level(logging.INFO)

    class Deserted(Swarm):
        looks = 0

        async def heartbeats(self, run_id: str) -> list[Any]:
            self.looks += 1
            return [] if self.looks < 4 or 6 <= self.looks < 9 else await super().heartbeats(run_id)

    async def scenario() -> None:
        swarm, run = Deserted(), Run(4)
        await swarm.add("a", Donor(run, frozen=2))
        assert [index for index, *_ in steps(await track(swarm, 4))] == [2, 3, 4]

    asyncio.run(scenario())
    messages = [record.message for record in caplog.records if record.name == "opendiloco.volunteer.tracking"]
    assert [message.rpartition(" ")[2] for message in messages] == ["peer.", "again"] * 2
    assert messages[0].startswith("no peer trains in the run tiny now")


def test_it_waits_for_what_comes() -> None:
    async def scenario() -> None:
        swarm, run = Swarm(), Run(4)
        await swarm.add("a", Donor(run, frozen=2))
        says(swarm, "a", run, 2)
        tracking = asyncio.create_task(track(swarm, 4))
        while len(swarm.pulls) < 2:
            await asyncio.sleep(0)
        says(swarm, "a", run, 4)
        assert [index for index, *_ in steps(await tracking)] == [2, 3, 4]

    asyncio.run(scenario())


def test_payloads_that_are_gone_are_skipped_with_a_snapshot() -> None:
    async def scenario() -> None:
        swarm, run = Swarm(), Run(6)
        await swarm.add("a", Donor(run, frozen=1, kept=2))
        assert [step[:2] for step in steps(await track(swarm, 6))] == [(1, True), (6, True)]
        swarm.assert_is_at(run, 6)

    asyncio.run(scenario())


@pytest.mark.parametrize("entries", [2, 3, 5])
def test_the_heavier_lineage_is_gone_over_to_even_if_it_is_shorter(entries: int) -> None:
    async def scenario() -> None:
        swarm, light, heavy = Swarm(), Run(3, b"light", 10), Run(entries, b"heavy", 100)
        await swarm.add("a", Donor(light, frozen=3))
        says(swarm, "a", light, 3)
        tracker = states_until(lambda _: 9, swarm.following, Audit(), POLL)
        assert steps([await anext(tracker)])[0][:2] == (3, True)
        await swarm.add("b", Donor(heavy, frozen=entries - 1))
        says(swarm, "b", heavy, entries)
        assert [steps([await anext(tracker)])[0][:2] for _ in range(2)] == [(entries - 1, True), (entries, False)]
        swarm.assert_is_at(heavy, entries)

    asyncio.run(scenario())


# Who has another state ------------------------------------------------------------------------------------------
def test_who_has_another_state_is_named_and_followed_all_the_same() -> None:
    async def scenario() -> None:
        swarm, run, audit = Swarm(), Run(4), Audit()
        for name in "ab":
            await swarm.add(name, Donor(run, frozen=3))
        says(swarm, "a", run, 4)
        says(swarm, "b", run, 4, LIE)
        news = await track(swarm, 4, audit)
        assert steps(news) == [(3, True, 0), (4, False, 1)]
        assert news[2:] == [Disagreement(4, "b", LIE, state_of(run, 4))]
        with pytest.raises(
            DisagreementError, match=r"1 peer had another state .* first b after outer step 4"
        ) as caught:
            audit.check()
        assert caught.value.exit_code == 12

    asyncio.run(scenario())


def test_what_is_said_later_counts_too() -> None:
    """Peers may be behind the follower, or say something else at the same place later."""
    run, audit = Run(3), Audit()
    audit.computed(run.logs[2].position, state_of(run, 2))
    audit.heard([beat("a", run.logs[2], state_digest=state_of(run, 2))])
    assert audit.agreeing(run.logs[2].position) == 1
    audit.check()
    for _ in range(2):
        audit.heard([beat("a", run.logs[2], sequence=2, state_digest=LIE)])
    assert audit.disagreements == [Disagreement(2, "a", LIE, state_of(run, 2))]
    assert audit.agreeing(run.logs[2].position) == 0


def test_other_lineages_and_archives_have_nothing_to_agree_with() -> None:
    run, other, audit = Run(2), Run(2, b"other"), Audit()
    audit.computed(run.logs[2].position, state_of(run, 2))
    audit.heard([beat("a", other.logs[2], state_digest=LIE)])
    audit.heard([beat("b", run.logs[2], PeerState.ARCHIVING, state_digest=LIE)])
    assert audit.agreeing(run.logs[2].position) == 0
    audit.check()


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendiloco.volunteer.tracking.POSITIONS", 2)
    run, audit = Run(3), Audit()
    for index in (1, 2, 3):
        audit.heard([beat("a", run.logs[index], state_digest=state_of(run, index))])
        audit.computed(run.logs[index].position, state_of(run, index))
    assert [audit.agreeing(run.logs[index].position) for index in (1, 2, 3)] == [0, 1, 1]
    assert audit.agreeing(Position(index=9, head=LIE)) == 0


# The state without a model, and what it all stands on -----------------------------------------------------------
def test_the_states_size_is_what_most_peers_say(small_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class OfConfig:
        settings = Swarm().following
        config = small_config

    run: Any = OfConfig()
    run.settings = type("Settings", (), {"empty_log": Swarm().following.log})

    async def scenario() -> None:
        swarm, entries = Swarm(), Run(2)
        with pytest.raises(SwarmUnreachableError, match="no peer trains"):
            await state_for(run, swarm)
        for name in "abc":
            donor = Donor(entries, frozen=2)
            if name == "a":
                donor.run.states[2] += b"more"
                donor.frozen = donor.run.snapshot(2)
                entries = Run(2)
            await swarm.add(name, donor)
        state = await state_for(run, swarm)
        assert state.state_size == len(entries.states[2])
        monkeypatch.setattr("opendiloco.shared_memory.available_memory", lambda: state.state_size)
        with pytest.raises(MachineError, match="Following this run: 0 MiB are needed"):
            await state_for(run, swarm)
        swarm.donors.clear()
        with pytest.raises(SwarmUnreachableError, match="no peer gave its state: peer a did not answer"):
            await state_for(run, swarm)

    asyncio.run(scenario())


def test_work_ends_with_what_it_stands_on() -> None:
    async def fails() -> LocalNetworkError:
        return LocalNetworkError("libp2p's daemon ended.")

    async def lasts() -> Any:
        await asyncio.Event().wait()

    async def works() -> int:
        return 7

    assert asyncio.run(unless_failed(works(), lasts())) == 7
    with pytest.raises(LocalNetworkError):
        asyncio.run(unless_failed(lasts(), fails()))
