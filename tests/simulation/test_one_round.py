"""One round of three healthy peers, message by message: a first look at the protocol.

`.venv/bin/python -m pytest tests/simulation/test_one_round.py -s` prints it.

The steps are those of docs/protocol.md (R3 to R6): members say Ready; the leader
Begins; blocks go to the reducers, and averages to all; reducers tell the leader their Parts; it Proposes a header; all
give vote 1, which prepares the header; then vote 2, which commits it; and each applies the entry. Among so few peers
all hear all votes, so that each puts the two certificates together itself.
"""

from __future__ import annotations

from peers.log.certificate import Certificate, Phase
from peers.messages.messages import Certified, Message, Vote
from peers.protocol.effects import SendChunk
from tests.peers.logs import SETTINGS
from tests.simulator.links import Faults, Rate
from tests.simulator.simulation import Swarm
from tests.simulator.trace import brief

STEPS = (
    "Ready",
    "Begin",
    "blocks",
    "average",
    "Part",
    "Propose",
    "Vote 1",
    "Certified 1",
    "Vote 2",
    "Certified 2",
    "Apply",
)


LINKS = tuple((name, Rate(up=1e6, down=1e6)) for name in "abc")


class Trace:
    """The lines of one round: what each peer sends, puts together, and applies."""

    def __init__(self, swarm: Swarm) -> None:
        self.steps: list[tuple[str, str]] = []
        """What happened, and at whom."""
        self._swarm = swarm
        self._began: float | None = None
        self._position = swarm.peers["a"].peer.log.position
        self._prepared: dict[str, Certified | None] = dict.fromkeys(swarm.peers)
        swarm.on_message, swarm.on_chunk = self._message, self._chunk
        swarm.on_effect, swarm.on_apply = self._look, self._apply

    def _line(self, step: str, who: str, to: str = "", details: str = "") -> None:
        self.steps.append((step, who))
        self._began = self._swarm.now if self._began is None else self._began
        way = f"{who} → {to}" if to else who
        print(f"{self._swarm.now - self._began:7.3f} s  {way:6} {step:12} {details}".rstrip())

    def _message(self, sender: str, to: str, message: Message) -> Message:
        kind = type(message).__name__ + (f" {message.choice.phase:d}" if isinstance(message, Vote) else "")
        self._line(kind, sender, to, " ".join(brief(message).split(" ")[2:]))
        return message

    def _chunk(self, sender: str, sent: SendChunk) -> bool:
        what = "averaged, with the reducer's signature" if sent.reduced else "with the path to the commitment"
        self._line("average" if sent.reduced else "blocks", sender, sent.to, f"chunk {sent.chunk}, {what}")
        return True

    def _look(self, name: str) -> None:
        """See whether a peer has put a prepare certificate together."""
        prepared = self._swarm.peers[name].peer.round.voter.prepared
        if prepared is not None and prepared != self._prepared[name]:
            self._prepared[name] = prepared
            self._certified(name, prepared.certificate)

    def _certified(self, name: str, certificate: Certificate | None) -> None:
        assert certificate is not None
        phase, what = certificate.choice.phase, brief_digest(certificate.choice.header)
        done = "prepared: it is locked" if phase is Phase.PREPARE else "committed: it is the entry"
        self._line(f"Certified {phase:d}", name, details=f"{len(certificate.signers)} votes, {what} is {done}")

    def _apply(self, name: str) -> None:
        followed = self._swarm.peers[name].peer.lineage.after(self._position)
        assert followed is not None
        header, certificate = followed
        self._certified(name, certificate)
        self._line("Apply", name, details=f"{brief_digest(header.digest)}, tokens of {', '.join(header.peers)}")


def brief_digest(digest: bytes) -> str:
    return digest.hex()[:8]


def test_one_round_of_three_peers() -> None:
    swarm = Swarm(1, SETTINGS, Faults(longest_delay=0.001, rates=LINKS), block_count=3, unevenness=0.02)
    for name in "abc":
        swarm.start(name)
    assert swarm.run(60, until=lambda: all(peer.index == 1 and peer.is_settled for peer in swarm.living))
    print("\nThe second entry of a run of a, b and c. Each averages one of three chunks; b leads.")
    trace = Trace(swarm)
    assert swarm.run(60, until=lambda: all(peer.index == 2 and peer.is_settled for peer in swarm.living))

    seen = [step for step, _ in trace.steps]
    assert set(seen) == set(STEPS), "nothing else is said when all are well"
    assert sorted(STEPS, key=seen.index) == list(STEPS), "in this order"
    assert seen.count("blocks") == seen.count("average") == 6, "each gives two others its blocks, and its average"
    for step in STEPS[-5:]:
        assert {who for one, who in trace.steps if one == step} == set("abc"), "all vote, lock, commit and apply"
    entry = swarm.peers["a"].peer.log.last
    assert entry is not None
    assert {who for step, who in trace.steps if step in ("Begin", "Propose")} == {entry.leader}
    assert len({(peer.peer.log.position.head, peer.state) for peer in swarm.living}) == 1, "the same entry, and state"
