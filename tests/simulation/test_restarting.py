"""Peers that start again, with their disks and without (R10): the same voters, or others that wait for a roster."""

from __future__ import annotations

import pytest

from peers.log.settings import RunSettings, Timing
from peers.protocol.effects import KeepVotes, Note, TokensLost, Trouble
from peers.protocol.pacemaker import death
from peers.values.wire import digest_of
from tests.simulator.simulation import Swarm

TIMING = Timing()
PATIENCE = 120.0  # seconds for an entry, with trainings of ten
DOWN = 3.0  # seconds from the end of a process to its next start
LONE = "peer00"


def swarm_of(peers: int, fragments: int = 1, minimum_peers: int | None = None) -> Swarm:
    """Return peers that have made two entries together."""
    manifest, minimum = digest_of(b"restarting"), minimum_peers or peers
    settings = RunSettings("restarting", manifest, 10, 20, 10, minimum, TIMING, fragments=fragments)
    swarm = Swarm(1, settings)
    for number in range(peers):
        swarm.start(f"peer{number:02}")
    goes_on(swarm, 2)
    return swarm


def goes_on(swarm: Swarm, entries: int = 2, seconds: float = PATIENCE) -> None:
    """Let the swarm make so many entries."""
    goal = swarm.longest + entries
    assert swarm.run(seconds * entries, until=lambda: swarm.longest >= goal), "\n".join(map(str, swarm.trace[-20:]))


def is_of_one_lineage(swarm: Swarm) -> None:
    """See that all are on one certified log, and that nothing that was in it is lost. The swarm sees that no place has
    two entries, and that no sample is trained twice."""
    assert swarm.run(PATIENCE, until=lambda: len({peer.index for peer in swarm.living}) == 1)
    assert all(peer.peer.lineage.doubt is None for peer in swarm.living), "all of it is certified"
    assert not [what for what in said(swarm, TokensLost) if what.what == "entries"]


def said(swarm: Swarm, kind: type) -> list:  # type: ignore[type-arg]
    """Return what peers have told their volunteers."""
    return [what for line in swarm.trace for what in line if isinstance(what, kind)]


def kill_at_effect(swarm: Swarm, name: str, number: int) -> None:
    """Have a peer die between two of the things that it wants done, the n-th from now on."""
    left = number

    def count(of: str) -> None:
        nonlocal left
        left -= of == name
        if of == name and left == 0:
            swarm.kill(name)

    swarm.on_effect = count
    assert swarm.run(PATIENCE, until=lambda: not swarm.peers[name].alive)
    swarm.on_effect = lambda name: None


@pytest.mark.parametrize(
    ("peers", "fragments"),
    [(1, 2), (2, 1), *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((1, 1), (2, 2), (3, 1), (3, 2)))],
)
def test_killed_between_any_two_of_its_deeds_it_is_the_same_voter_when_it_starts_again(
    peers: int, fragments: int
) -> None:
    """A lone volunteer has some 40 in an outer step: from one kill to the next comes more than one."""
    swarm = swarm_of(peers, fragments)
    incarnation = swarm.peers[LONE].peer.incarnation
    for number in range(1, 64, 1 if peers == 1 else 3):
        kill_at_effect(swarm, LONE, number)
        swarm.run(DOWN)
        swarm.start(LONE)
        goes_on(swarm, 1)
        assert swarm.peers[LONE].peer.incarnation == incarnation
    is_of_one_lineage(swarm)
    assert not swarm.history.named


def test_all_that_are_killed_at_once_go_on_where_they_were() -> None:
    swarm = swarm_of(3)
    for number in range(1, 60, 4):
        kill_at_effect(swarm, LONE, number)
        for name in swarm.peers:
            swarm.kill(name)
        swarm.run(DOWN)
        for name in swarm.peers:
            swarm.start(name)
        goes_on(swarm, 1)
    is_of_one_lineage(swarm)


@pytest.mark.parametrize("peers", [1, 2])
def test_who_leaves_last_is_the_same_voter_when_it_comes_back(peers: int) -> None:
    """Its farewell would be of use to nobody (R11). A peer that has said one is another incarnation."""
    swarm = swarm_of(peers)
    before = {name: peer.peer.incarnation for name, peer in swarm.peers.items()}
    for _ in range(2):
        for name in sorted(swarm.peers, reverse=True):
            swarm.leave(name)
            swarm.run(TIMING.leave + death(TIMING))
        assert not swarm.living
        for name in swarm.peers:
            swarm.start(name)
        assert swarm.peers[LONE].peer.incarnation == before[LONE]
        goes_on(swarm, 2, TIMING.partition_grace + PATIENCE)
    assert swarm.run(PATIENCE, until=lambda: len({peer.index for peer in swarm.living}) == 1)


# Without the record, or the payload ------------------------------------------------------------------------------
def test_who_has_lost_its_disk_is_another_voter_and_has_a_say_once_an_entry_has_it() -> None:
    swarm = swarm_of(3)
    before = swarm.peers[LONE].peer.incarnation
    swarm.kill(LONE)
    swarm.disk_of(LONE).lose()
    swarm.start(LONE)
    lone = swarm.peers[LONE].peer
    assert lone.incarnation != before
    assert swarm.run(4 * PATIENCE, until=lambda: lone.log.counts(LONE, lone.incarnation))
    is_of_one_lineage(swarm)


def test_a_lone_volunteer_that_has_lost_its_record_goes_on_after_the_partition_grace() -> None:
    swarm = swarm_of(1)
    swarm.run(DOWN)  # the last entry is on the disk by now
    swarm.kill(LONE)
    swarm.disk_of(LONE).record = None
    swarm.start(LONE)
    before = swarm.longest
    goes_on(swarm, 1, TIMING.partition_grace + PATIENCE)
    assert swarm.history.longest == before + 1


def test_a_peer_whose_locks_payload_is_nowhere_gives_its_vote_up() -> None:
    swarm = swarm_of(1)
    disk, incarnation = swarm.disk_of(LONE), swarm.peers[LONE].peer.incarnation
    lock_alone(swarm)
    swarm.one_child = swarm.history.one_child = False  # the locked entry is made anew, in another round
    disk._payloads.clear()
    swarm.start(LONE)
    goes_on(swarm, 2, 2 * TIMING.partition_grace + PATIENCE)
    assert swarm.peers[LONE].peer.incarnation != incarnation
    assert any("no peer has the payload" in note.text for note in said(swarm, Note))


def lock_alone(swarm: Swarm) -> None:
    """Kill a lone volunteer when its vote 2 is on the disk, and nobody has heard of it."""
    carry_out = swarm.peers[LONE].carry_out

    def die(effect: object) -> None:
        is_vote_2 = isinstance(effect, KeepVotes) and effect.record.states[-1].commit is not None
        if is_vote_2:
            swarm.disk_of(LONE).record = effect.record  # type: ignore[attr-defined]
            swarm.kill(LONE)
        else:
            carry_out(effect)  # type: ignore[arg-type]

    swarm.peers[LONE].carry_out = die  # type: ignore[method-assign]
    assert swarm.run(PATIENCE, until=lambda: not swarm.peers[LONE].alive)


def test_what_was_locked_is_made_with_the_payload_from_the_disk() -> None:
    swarm = swarm_of(1)
    lock_alone(swarm)
    record = swarm.disk_of(LONE).record
    assert record is not None
    lock = record.states[-1].lock
    assert lock is not None
    swarm.start(LONE)
    goes_on(swarm, 1)
    assert swarm.peers[LONE].peer.lineage.after(lock.position) is not None
    assert swarm.history.children[lock.header.previous, 0] == lock.header.digest
    is_of_one_lineage(swarm)


# A disk that takes nothing ---------------------------------------------------------------------------------------
def test_a_lone_volunteer_with_a_full_disk_votes_nothing_and_goes_on_when_there_is_room() -> None:
    swarm = swarm_of(1)
    swarm.disk_of(LONE).is_full = True
    before = swarm.longest
    swarm.run(2 * PATIENCE)
    assert swarm.longest <= before + 1, "an entry that was under way"
    assert "does not vote" in swarm.peers[LONE].peer.hindrances.reported_reason
    swarm.disk_of(LONE).is_full = False
    goes_on(swarm)
    assert swarm.peers[LONE].peer.hindrances.reported_reason == ""
    is_of_one_lineage(swarm)


def test_a_member_with_a_full_disk_has_no_vote_and_counts() -> None:
    swarm = swarm_of(3)
    swarm.disk_of(LONE).is_full = True
    swarm.run(PATIENCE)
    counted = swarm.history.counted[LONE]
    goes_on(swarm, 3)
    assert swarm.history.counted[LONE] > counted
    assert any(trouble.reason.startswith("this peer does not vote") for trouble in said(swarm, Trouble))


# A record that was set back --------------------------------------------------------------------------------------
@pytest.mark.parametrize("deeds", range(1, 40, 3))
def test_a_voter_that_is_set_back_is_convicted_or_harmless(deeds: int) -> None:
    """Its disk is as it was amid an outer step before: it may have voted since. That convicts it alone, and the others
    go on, without a fork: they are a quorum (docs/protocol.md, what is not promised)."""
    swarm = swarm_of(4)
    swarm.history.liars = frozenset({LONE})
    image = swarm.disk_of(LONE).image()
    kill_at_effect(swarm, LONE, deeds)
    swarm.disk_of(LONE).set_back(image)
    swarm.start(LONE)
    goes_on(swarm, 3)
    assert set(swarm.history.named) <= {"votes"}
    others = [peer for peer in swarm.living if peer.name != LONE]
    assert swarm.run(PATIENCE, until=lambda: len({peer.index for peer in others}) == 1)
    assert all(peer.peer.lineage.doubt is None for peer in others)
