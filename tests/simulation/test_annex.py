"""The log excludes a peer that signs two contradicting statements, and no other; no round waits for that (R9)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from peers.log.settings import RunSettings, Timing
from peers.messages.messages import Message, Proof, Propose
from peers.protocol.effects import Trouble
from peers.values.wire import digest_of
from tests.simulation.test_blame import understates
from tests.simulator.malice import SIGNED, Deceit, plant
from tests.simulator.schedules import agreed, draw_life, live, report
from tests.simulator.simulation import Swarm

SETTINGS = RunSettings("simulated", digest_of(b"manifest"), 10, 20, 10, 3, Timing())
LIAR = "peer3"


def lying(
    kind: str,
    settings: RunSettings = SETTINGS,
    seed: int = 1,
    peers: int = 5,
    liar: str = LIAR,
    besides: tuple[Deceit, ...] = (),
) -> Swarm:
    """A swarm in which a peer lies from the second entry on, `besides` others. Of many blocks it averages some, however
    slow its link is measured to be."""
    swarm = Swarm(seed, settings, block_count=28 if kind == "many averages" else 7)
    swarm.training_time = lambda steps: steps * swarm.random.uniform(0.8, 1.2)  # type: ignore[method-assign]
    plant(swarm, (Deceit(liar, kind, 2), *besides))
    for number in range(peers):
        swarm.start(f"peer{number}")
    return swarm


def excluded(swarm: Swarm) -> Iterator[frozenset[str]]:
    """Whom the log of each honest peer excludes."""
    return (frozenset(one.peer.log.excluded) for one in swarm.honest)


def excluded_from(kind: str, seed: int) -> int:
    """Return the entry from which on a liar is excluded that lies after the second one; for good, as is looked at."""
    swarm = lying(kind, seed=seed)
    assert swarm.run(300.0, until=lambda: all(names == {LIAR} for names in excluded(swarm)))
    assert swarm.history.named.keys() == {SIGNED[kind]}
    start = min(next(iter(one.peer.log.excluded.values())) for one in swarm.honest) - SETTINGS.exclusion
    before = swarm.longest
    assert swarm.run(100.0, until=lambda: swarm.longest >= before + 4 and agreed_among_honest(swarm))
    for one in swarm.honest:
        assert LIAR not in one.peer.log.roster
        assert LIAR not in one.peer.log.leases
    return start


@pytest.mark.parametrize("kind", sorted(SIGNED))
def test_who_is_proven_to_lie_is_excluded_within_two_entries(kind: str) -> None:
    assert excluded_from(kind, 1) <= 5, "it may be in the round of the fourth"


def agreed_among_honest(swarm: Swarm) -> bool:
    return len({one.peer.log.position.head for one in swarm.honest}) == 1


def test_who_is_excluded_is_told_so_and_comes_back_when_its_time_is_over() -> None:
    swarm = lying("many averages", replace(SETTINGS, exclusion=4))
    assert swarm.run(300.0, until=lambda: any(excluded(swarm)) and swarm.longest > 2)
    assert swarm.run(300.0, until=lambda: all(not names for names in excluded(swarm)))
    told = [what for line in swarm.trace for what in line if isinstance(what, Trouble)]
    assert any("excludes it for the next" in trouble.reason for trouble in told)


def test_a_contribution_with_another_norm_than_the_committed_one_excludes_its_owner() -> None:
    swarm = Swarm(1, SETTINGS)
    swarm.training_time = lambda steps: steps * swarm.random.uniform(0.8, 1.2)  # type: ignore[method-assign]
    swarm.history.liars = frozenset({"peer4"})
    for number in range(5):
        swarm.start(f"peer{number}")
    assert swarm.run(300.0, until=lambda: agreed(swarm) and len(swarm.peers["peer0"].peer.log.roster) == 5)
    understates(swarm)
    assert swarm.run(300.0, until=lambda: "peer4" in swarm.peers["peer0"].peer.log.excluded)
    assert swarm.history.named.keys() == {"contribution"}


def told(swarm: Swarm, liar: str) -> list[Message]:
    """What a liar says of faults from now on."""
    said = list[Message]()

    def on_message(sender: str, to: str, message: Message) -> Message:
        if sender == liar and (isinstance(message, Proof) or (isinstance(message, Propose) and message.header.faults)):
            said.append(message)
        return message

    swarm.on_message = on_message
    return said


@pytest.mark.parametrize(("kind", "liar"), [("names the honest", "peer1"), ("forged proofs", LIAR)])
def test_nobody_is_excluded_by_lies_about_it(kind: str, liar: str) -> None:
    """A leader alone can name faults: peer1 leads first."""
    swarm = lying(kind, liar=liar)
    said = told(swarm, liar)
    assert swarm.run(300.0, until=lambda: swarm.longest >= 10)
    assert said
    assert not any(excluded(swarm))
    assert not swarm.history.named


def test_proofs_that_are_repeated_exclude_whom_they_convict_once() -> None:
    """The leader, peer1, shows the proofs to its members, of which one repeats them."""
    swarm = lying("many averages", besides=(Deceit("peer2", "old proofs", 2),))
    said = told(swarm, "peer2")
    assert swarm.run(300.0, until=lambda: any(excluded(swarm)))
    before = swarm.longest
    assert swarm.run(300.0, until=lambda: swarm.longest >= before + 5)
    assert len(said) > 20
    assert all(names == {LIAR} for names in excluded(swarm))
    assert sum(swarm.history.named.values()) == len(list(swarm.honest))


def test_a_run_may_exclude_nobody() -> None:
    swarm = lying("many averages", replace(SETTINGS, exclusion=0))
    assert swarm.run(600.0, until=lambda: swarm.longest >= 8)
    assert not swarm.history.named


@pytest.mark.thorough
def test_random_lives_with_lies_that_signatures_prove() -> None:
    for seed in range(500, 505):
        life = draw_life(seed, kinds=(*SIGNED, "names the honest", "forged proofs", "old proofs"))
        try:
            live(life)
        except Exception:
            pytest.fail(report(life))
