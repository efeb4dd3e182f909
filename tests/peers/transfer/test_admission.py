"""What is let in of a round's chunks: what is waited for is stored, what is late or early is nobody's fault, and what
is wrong is its sender's."""

from __future__ import annotations

import pytest

from peers.errors import RemoteProtocolError
from peers.protocol.commitment import ChunkProof
from peers.protocol.events import AverageTooEarly, BadBlocks, ContributionArrived, ReducedArrived
from peers.protocol.rounds import Attempt
from peers.transfer.averages import Admission, Admitted, ChunkHeader
from peers.transfer.buffers import PayloadBuffers
from peers.values.chunks import Sum
from peers.values.wire import digest_of
from peers.values.workload import Blocks
from tests.peers.builders import SIZE, Rig, commitment
from tests.peers.fakes import BLOCK, GARBAGE, PROOF, FakeWorkload, trust_all
from tests.peers.protocol.test_peer import at_second

DATA = b"A" * BLOCK
DIGEST = digest_of(DATA)
LATE = Admitted(None, is_taken=True)
EARLY = Admitted(None, is_taken=False)


class Door:
    """Of b. In a round of a, b and c, a reduces the chunks 0 and 1, b 2 and 3, and c 4 and 5."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.buffers = PayloadBuffers(FakeWorkload())
        self.admission = Admission(rig.peer, self.buffers, FakeWorkload().squared_norm)
        if rig.peer.exchange:
            self.buffers.open(self.round)
            self.buffers.own = bytes(SIZE.bytes)
            trust_all(rig.peer)

    @property
    def round(self) -> Attempt:
        assert self.rig.peer.exchange is not None
        return self.rig.peer.exchange.name

    def take(
        self,
        sender: str,
        chunk: int,
        data: bytes = DATA,
        *,
        reduced: bool = False,
        absent: tuple[str, ...] = (),
        round: Attempt | None = None,
        proof: ChunkProof | None = PROOF,
        signature: bytes | None = None,
    ) -> Admitted:
        """What the protocol hears of it, it takes in."""
        proof = None if reduced else proof
        header = ChunkHeader(chunk=chunk, reduced=reduced, absent=absent, proof=proof, signature=signature)
        admitted = self.admission.take(sender, round or self.round, header, data)
        if admitted.event is not None:
            self.rig.do(admitted.event)
        return admitted


@pytest.fixture
def door() -> Door:
    return Door(at_second().trained().averaging())


def test_blocks_that_are_waited_for_are_stored_as_they_are(door: Door) -> None:
    assert door.take("a", 2) == Admitted(ContributionArrived(door.round, "a", 2), is_taken=True)
    current = door.buffers.round(door.round)
    assert current is not None
    assert current.contributions[2]["a"] is DATA


def test_an_average_that_is_waited_for_is_copied_to_its_place(door: Door) -> None:
    event = ReducedArrived(door.round, "c", 4, ())
    assert door.take("c", 4, reduced=True) == Admitted(event, is_taken=True)
    assert door.buffers.read(door.round, 4, is_averaged=True) == DATA


def test_an_average_may_lack_blocks_of_those_that_are_lost_and_of_nobody_else(door: Door) -> None:
    """Whoever averages may have heard of the loss before us."""
    early = Admitted(AverageTooEarly(door.round, "a", 0), is_taken=False)
    assert door.take("a", 0, reduced=True, absent=("c",)) == early
    assert door.rig.peer.exchange is not None
    assert door.rig.peer.exchange.disputed == {"a"}
    door.rig.hear("a", door.rig.begin(2, lost="c", name=door.round))
    event = ReducedArrived(door.round, "a", 0, ("c",))
    assert door.take("a", 0, reduced=True, absent=("c",)) == Admitted(event, is_taken=True)
    assert door.rig.peer.exchange.disputed == set()


@pytest.mark.parametrize("reduced", [False, True])
def test_what_comes_twice_is_late(door: Door, reduced: bool) -> None:
    sender, chunk = ("c", 4) if reduced else ("a", 2)
    door.take(sender, chunk, reduced=reduced)
    assert door.take(sender, chunk, b"B" * BLOCK, reduced=reduced) == LATE


@pytest.mark.parametrize(
    ("sender", "chunk", "reduced"),
    [("a", 0, False), ("a", 5, False), ("a", 2, True), ("a", 5, True), ("z", 2, False), ("z", 4, True)],
    ids=["its own part", "another's part", "averaged by us", "averaged by another", "a stranger's", "its average"],
)
def test_what_nobody_waits_for_is_not_taken(door: Door, sender: str, chunk: int, reduced: bool) -> None:
    assert door.take(sender, chunk, reduced=reduced) == EARLY
    assert door.take(sender, chunk, GARBAGE, reduced=reduced) == EARLY, "nobody looks at it"


def test_chunks_of_another_round_are_not_taken(door: Door) -> None:
    assert door.take("a", 2, round=door.rig.attempt(7)) == EARLY
    door.buffers.close()
    assert door.take("a", 2) == EARLY


def test_nothing_is_taken_while_no_round_is_under_way() -> None:
    rig = at_second().trained()
    assert Door(rig).take("a", 2, round=rig.attempt()) == EARLY


def test_who_is_lost_is_in_no_round_with_us_any_more(door: Door) -> None:
    assert door.admission.is_shared(door.round, "c")
    door.rig.hear("a", door.rig.begin(2, lost="c", name=door.round))
    assert not door.admission.is_shared(door.round, "c")
    assert door.take("c", 2) == EARLY
    assert door.take("a", 2).is_taken


@pytest.mark.parametrize("reduced", [False, True])
def test_garbage_is_its_senders_fault(door: Door, reduced: bool) -> None:
    sender, chunk = ("c", 4) if reduced else ("a", 2)
    event, is_taken = door.take(sender, chunk, GARBAGE, reduced=reduced)
    assert isinstance(event, BadBlocks)
    assert (event.sender, event.chunk, event.reason, is_taken) == (sender, chunk, "code -128", False)
    assert (event.evidence is None) == reduced, "of averages nothing is signed"
    assert door.buffers.read(door.round, chunk, is_averaged=True) == bytes(BLOCK)


@pytest.mark.parametrize("proof", [None, ChunkProof(squares=2.0, path=b"")], ids=["none", "another's"])
def test_blocks_that_nobody_committed_to_are_not_taken_and_show_nothing(door: Door, proof: ChunkProof | None) -> None:
    reason = "it has not committed to this"
    assert door.take("a", 2, proof=proof) == Admitted(BadBlocks(door.round, "a", 2, reason), is_taken=False)


def test_blocks_with_another_norm_than_was_committed_to_are_evidence(door: Door) -> None:
    door.admission = Admission(door.rig.peer, door.buffers, Longer().squared_norm)
    event, is_taken = door.take("a", 2)
    assert isinstance(event, BadBlocks)
    assert not is_taken
    assert event.reason == "its squared norm is 4, not 1"
    assert event.evidence is not None
    assert (event.evidence.data, event.evidence.proof) == (DATA, PROOF)


class Longer(FakeWorkload):
    """What comes is twice as long as it says."""

    def squared_norm(self, blocks: Blocks, first_block: int, fragment: int = 0) -> float:
        return 4.0


@pytest.mark.parametrize(("squares", "is_taken"), [(4.1, False), (4.0, True)])
def test_an_average_that_is_longer_than_what_it_is_made_of_is_not_taken(
    door: Door, squares: float, is_taken: bool
) -> None:
    """The members have committed to norms of 1."""
    codec = FakeWorkload()
    codec.squared_norm = lambda blocks, first_block, fragment=0: squares  # type: ignore[method-assign]
    door.admission = Admission(door.rig.peer, door.buffers, codec.squared_norm)
    assert door.take("c", 4, reduced=True).is_taken == is_taken


def test_all_averages_of_a_reducer_together_are_no_longer_than_what_they_are_made_of(door: Door) -> None:
    """Else the more chunks a part has, the further its reducer could move theta."""
    codec = FakeWorkload()
    codec.squared_norm = lambda blocks, first_block, fragment=0: 2.5  # type: ignore[method-assign]
    door.admission = Admission(door.rig.peer, door.buffers, codec.squared_norm)
    assert door.take("c", 4, reduced=True).is_taken
    event, is_taken = door.take("c", 5, reduced=True)
    reason = "what its reducer gives is longer than what it can be made of"
    assert (event, is_taken) == (BadBlocks(door.round, "c", 5, reason), False)
    assert door.take("a", 0, reduced=True).is_taken, "another's"


def test_blocks_come_with_their_owners_signature_of_what_it_committed_to(door: Door) -> None:
    """Begin tells what each has committed to, and none of the signatures. The leader might have made it up."""
    exchange, position = door.rig.peer.exchange, door.round.position
    assert exchange is not None
    del exchange.commitment  # it does not trust everybody any more
    refused = Admitted(BadBlocks(door.round, "a", 2, "it has not signed what it committed to"), is_taken=False)
    others = [
        commitment("c", 0, position),
        commitment("a", 1, position),
        commitment("a", 0, position, Sum(DIGEST, 1.0)),
    ]
    for signature in (None, bytes(64), *(one.signature for one in others)):
        assert door.take("a", 2, signature=signature) == refused
    own = commitment("a", 0, position)
    assert door.take("a", 2, signature=own.signature).is_taken
    event, _ = door.take("a", 3, GARBAGE, signature=own.signature)
    assert isinstance(event, BadBlocks)
    assert event.evidence is not None
    assert event.evidence.commitment == own, "it convicts its owner"


@pytest.mark.parametrize("absent", [("a", "b", "c"), ("z",), ("a", "a")], ids=", ".join)
def test_an_average_of_nobody_is_its_senders_fault(door: Door, absent: tuple[str, ...]) -> None:
    event, is_taken = door.take("c", 4, reduced=True, absent=absent)
    assert (event, is_taken) == (BadBlocks(door.round, "c", 4, "nobody is left in it"), False)


@pytest.mark.parametrize(
    ("chunk", "length", "reason"),
    [(SIZE.chunks, BLOCK, "no chunk 6"), (2, BLOCK + 1, f"not {BLOCK}"), (2, 0, f"not {BLOCK}")],
    ids=["one chunk more", "one byte more", "nothing"],
)
def test_what_is_no_whole_chunk_need_not_be_read(door: Door, chunk: int, length: int, reason: str) -> None:
    header = ChunkHeader(chunk=chunk, reduced=False, absent=())
    with pytest.raises(RemoteProtocolError, match=reason) as caught:
        door.admission.check_size("a", header, length)
    assert caught.value.peer == "a"
