"""Who lies in rounds is found out by what it has signed, and costs the others one round at most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from peers.protocol.averages import Averages

from peers.log.settings import RunSettings, Timing
from peers.protocol.effects import Note, SendChunk
from peers.transfer.averages import Admission
from peers.transfer.buffers import inspection, offer
from peers.values.chunks import Sum
from peers.values.wire import digest_of
from peers.values.workload import Trained
from tests.simulator.schedules import agreed
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.simulation import Swarm

SETTINGS = RunSettings("simulated", digest_of(b"manifest"), 10, 20, 10, 3, Timing())
LIAR = "peer4"


def two_averages(swarm: Swarm) -> None:
    """Give each member another average, and sign each."""
    send_chunk, fooled = swarm.send_chunk, list[str]()

    def send(sender: SimulatedPeer, send: SendChunk, data: bytes) -> None:
        exchange = sender.peer.exchange
        if sender.name == LIAR and send.reduced and exchange is not None:
            data = digest_of(send.to.encode() + data)[: len(data)]
            averages = exchange.averages
            mine = Averages(LIAR, send.round_name, averages._keys, averages._starts, exchange.round.terms)
            mine.sign(send.chunk, digest_of(data), send.absent)
            send = replace(send, origin=mine.origin(send.chunk))
            fooled.append(send.to)
        send_chunk(sender, send, data)

    swarm.send_chunk = send  # type: ignore[method-assign]


def understates(swarm: Swarm) -> None:
    """Commit to a hundredth of the norm that its blocks have."""
    mine = swarm.peers[LIAR].fragments[0]
    inspect = inspection(mine.workload.squared_norm, mine.buffers)

    def commit_to(trained: Trained) -> Sum:
        return offer(mine.workload.contribution(trained), mine.buffers, lambda *blocks: inspect(*blocks) / 10000)

    mine.commit_to = commit_to  # type: ignore[method-assign]


def accuses_falsely(swarm: Swarm) -> None:
    """Show what others have honestly committed to as if it were evidence."""
    mine = swarm.peers[LIAR].fragments[0]
    honest, commit_to = mine.workload.squared_norm, mine.commit_to
    is_own = [False]

    def commit(trained: Trained) -> Sum:
        is_own[0] = True
        root = commit_to(trained)
        is_own[0] = False
        return root

    mine.commit_to = commit  # type: ignore[method-assign]
    liar = swarm.peers[LIAR]
    liar._admissions = [
        Admission(liar.peer, mine.buffers, lambda blocks, first, _: honest(blocks, first) if is_own[0] else 1.0)
    ]


def other_blocks(swarm: Swarm) -> None:
    """Send what it has not committed to."""
    send_chunk = swarm.send_chunk

    def send(sender: SimulatedPeer, send: SendChunk, data: bytes) -> None:
        is_own = sender.name == LIAR and not send.reduced
        send_chunk(sender, send, digest_of(data)[: len(data)] if is_own else data)

    swarm.send_chunk = send  # type: ignore[method-assign]


def notes(swarm: Swarm) -> str:
    return "\n".join(what.text for line in swarm.trace for what in line if isinstance(what, Note))


LIES: dict[str, tuple[Callable[[Swarm], None], str]] = {
    "two averages": (two_averages, f"{LIAR} gave"),
    "another norm": (understates, f"{LIAR} sent"),
    "false evidence": (accuses_falsely, f"{LIAR} accuses"),
    "other blocks": (other_blocks, f"{LIAR} can exchange nothing with most others"),
}


def five_together() -> Swarm:
    """Who leads next is honest: nobody judges a leader."""
    swarm = Swarm(1, SETTINGS)
    swarm.history.liars = frozenset({LIAR})
    swarm.training_time = lambda steps: steps * swarm.random.uniform(0.8, 1.2)  # type: ignore[method-assign]
    for number in range(5):
        swarm.start(f"peer{number}")

    def are_together() -> bool:
        return agreed(swarm) and all(len(one.peer.log.roster) == 5 for one in swarm.living)

    assert swarm.run(300.0, until=are_together)
    assert leader_of(swarm) != LIAR
    return swarm


def leader_of(swarm: Swarm) -> str:
    return swarm.peers["peer0"].peer.log.roster[0]


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_is_found_out_and_nobody_else_is_left_out(lie: str) -> None:
    begin, reason = LIES[lie]
    swarm = five_together()
    begin(swarm)
    before = swarm.longest
    assert swarm.run(300.0, until=lambda: swarm.longest >= before + 8)
    told = notes(swarm)
    assert reason in told
    honest = [one for one in swarm.living if one.name != LIAR]
    for one in honest:
        assert one.peer.presence.standing.barred(one.time(swarm.now)) <= {LIAR}


def test_a_leader_that_is_late_for_its_own_round_finds_out_who_has_lied() -> None:
    """Regression: it had no averages to compare with, and ended up to six attempts."""
    swarm = five_together()
    before = swarm.longest
    assert swarm.run(60.0, until=lambda: swarm.longest > before)
    late = leader_of(swarm)
    swarm.peers[late].speed /= 50
    two_averages(swarm)
    told, before = len(notes(swarm).splitlines()), swarm.longest
    assert swarm.run(300.0, until=lambda: swarm.longest >= before + 2)
    failed = [note for note in notes(swarm).splitlines()[told:] if "failed" in note]
    assert len(failed) == 1, failed
    assert f"{LIAR} gave" in failed[0]
    assert late not in swarm.peers["peer0"].peer.log.roster
