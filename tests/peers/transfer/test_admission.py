"""What is let in of a round's chunks: what is waited for is stored, what is late or early is nobody's fault, and what
is wrong is its sender's."""

from __future__ import annotations

from typing import Any, cast

import pytest

from peers.errors import RemoteProtocolError
from peers.messages.averages import Averaged, Origin, statement_of
from peers.messages.commitment import ChunkProof, Contribution
from peers.messages.rounds import RoundName
from peers.protocol.events import BadBlocks, ContributionArrived, ReducedArrived
from peers.protocol.exchange import Exchange
from peers.transfer.averages import Admission, Admitted, ChunkHeader
from peers.transfer.buffers import PayloadBuffers
from peers.values.wire import digest_of
from peers.values.workload import Blocks
from tests.peers.fakes import BLOCK, GARBAGE, PROOF, FakeWorkload, trust_all
from tests.peers.rounds import SIZE, InRound, commitment, round_among, round_name, signed_by

DATA = b"A" * BLOCK
DIGEST = digest_of(DATA)
LATE = Admitted(None, is_taken=True)
EARLY = Admitted(None, is_taken=False)
ROUND = round_among("abc", each=2)
ORIGIN = Origin(reducer="c", signature=bytes(64))


class Door:
    """Of b. In a round of a, b and c, a averages the chunks 0 and 1, b 2 and 3, and c 4 and 5."""

    def __init__(self, is_in_round: bool = True, workload: FakeWorkload | None = None) -> None:
        self.peer = InRound("b")
        self.buffers = PayloadBuffers(FakeWorkload())
        self.measure(workload or FakeWorkload())
        if is_in_round:
            self.peer.begin(ROUND)
            self.buffers.open(ROUND.name)
            self.buffers.own = bytes(SIZE.bytes)
            trust_all(self.exchange)

    def measure(self, workload: FakeWorkload) -> None:
        self.admission = Admission(cast(Any, self.peer), self.buffers, workload.squared_norm)

    @property
    def exchange(self) -> Exchange:
        assert self.peer.exchange is not None
        return self.peer.exchange

    def take(
        self,
        sender: str,
        chunk: int,
        data: bytes = DATA,
        *,
        round: RoundName = ROUND.name,
        proof: ChunkProof | None = PROOF,
        signature: bytes | None = None,
    ) -> Admitted:
        header = ChunkHeader(chunk=chunk, reduced=False, absent=(), proof=proof, signature=signature)
        return self._admit(self.admission.take(sender, round, header, data))

    def take_average(
        self,
        sender: str,
        chunk: int,
        data: bytes = DATA,
        *,
        absent: tuple[str, ...] = (),
        round: RoundName = ROUND.name,
        origin: Origin | None = ORIGIN,
    ) -> Admitted:
        header = ChunkHeader(chunk=chunk, reduced=True, absent=absent, origin=origin)
        return self._admit(self.admission.take(sender, round, header, data))

    def _admit(self, admitted: Admitted) -> Admitted:
        """The protocol takes in what it hears."""
        if admitted.event is not None:
            self.peer.handle(admitted.event)
        return admitted


@pytest.fixture
def door() -> Door:
    return Door()


def test_blocks_that_are_waited_for_are_stored_as_they_are(door: Door) -> None:
    assert door.take("a", 2) == Admitted(ContributionArrived(ROUND.name, "a", 2), is_taken=True)
    current = door.buffers.round(ROUND.name)
    assert current is not None
    assert current.contributions[2]["a"] is DATA


@pytest.mark.parametrize("sender", ["c", "a"], ids=["its reducer", "another member"])
def test_an_average_that_is_waited_for_is_copied_to_its_place_whoever_hands_it_on(door: Door, sender: str) -> None:
    event = ReducedArrived(ROUND.name, sender, 4, ("a",))
    assert door.take_average(sender, 4, absent=("a",)) == Admitted(event, is_taken=True)
    assert door.buffers.read(ROUND.name, 4, is_averaged=True) == DATA
    here = door.exchange.averages.of(4)
    assert here == Averaged(chunk=4, digest=DIGEST, absent=("a",), origin=ORIGIN)


def test_what_comes_twice_is_late(door: Door) -> None:
    door.take("a", 2)
    assert door.take("a", 2, b"B" * BLOCK) == LATE
    door.take_average("c", 4)
    assert door.take_average("c", 4, b"B" * BLOCK) == LATE
    assert door.buffers.read(ROUND.name, 4, is_averaged=True) == DATA


@pytest.mark.parametrize(
    ("sender", "chunk"), [("a", 0), ("a", 5), ("z", 2)], ids=["its own part", "another's part", "a stranger's"]
)
def test_blocks_that_nobody_waits_for_are_not_taken(door: Door, sender: str, chunk: int) -> None:
    assert door.take(sender, chunk) == EARLY
    assert door.take(sender, chunk, GARBAGE) == EARLY, "nobody looks at it"


def test_an_average_of_a_stranger_is_not_taken(door: Door) -> None:
    assert door.take_average("z", 4) == EARLY


def test_chunks_of_another_round_are_not_taken(door: Door) -> None:
    assert door.take("a", 2, round=round_name(7)) == EARLY
    assert door.take_average("c", 4, round=round_name(7)) == EARLY
    door.buffers.close()
    assert door.take("a", 2) == EARLY


def test_nothing_is_taken_while_no_round_is_under_way() -> None:
    assert Door(is_in_round=False).take("a", 2) == EARLY


def test_members_share_a_round(door: Door) -> None:
    assert door.admission.is_shared(ROUND.name, "c")
    assert not door.admission.is_shared(ROUND.name, "z")
    assert not door.admission.is_shared(round_name(7), "c")


def test_garbage_is_the_fault_of_the_peer_that_signed_it(door: Door) -> None:
    event, is_taken = door.take("a", 2, GARBAGE)
    assert isinstance(event, BadBlocks)
    assert (event.sender, event.reason, event.reduced, is_taken) == ("a", "code -128", False, False)
    assert event.evidence is not None
    average = BadBlocks(ROUND.name, "c", 4, "code -128", reduced=True)
    assert door.take_average("a", 4, GARBAGE) == Admitted(average, is_taken=False)
    assert door.buffers.read(ROUND.name, 4, is_averaged=True) == bytes(BLOCK)
    assert door.take("a", 2) == LATE, "it is absent from this chunk"


@pytest.mark.parametrize("proof", [None, ChunkProof(squares=2.0, path=b"")], ids=["none", "another's"])
def test_blocks_that_nobody_committed_to_are_not_taken_and_show_nothing(door: Door, proof: ChunkProof | None) -> None:
    reason = "it has not committed to these blocks"
    assert door.take("a", 2, proof=proof) == Admitted(BadBlocks(ROUND.name, "a", 2, reason), is_taken=False)


def test_blocks_with_another_norm_than_was_committed_to_are_evidence(door: Door) -> None:
    door.measure(Measuring(4.0))
    event, is_taken = door.take("a", 2)
    assert isinstance(event, BadBlocks)
    assert not is_taken
    assert event.reason == "its squared norm is 4, not 1"
    assert event.evidence is not None
    assert (event.evidence.data, event.evidence.proof) == (DATA, PROOF)


class Measuring(FakeWorkload):
    """Finds the same squared norm in all blocks."""

    def __init__(self, squares: float) -> None:
        super().__init__()
        self.squares = squares

    def squared_norm(self, blocks: Blocks, first_block: int, fragment: int = 0, format: int = 0) -> float:
        return self.squares


@pytest.mark.parametrize(("squares", "is_taken"), [(4.1, False), (4.0, True)])
def test_an_average_that_is_longer_than_what_it_is_made_of_is_not_taken(squares: float, is_taken: bool) -> None:
    """The members have committed to norms of 1."""
    assert Door(workload=Measuring(squares)).take_average("c", 4).is_taken == is_taken


def test_all_averages_of_a_reducer_together_are_no_longer_than_what_they_are_made_of() -> None:
    """Else the more chunks a part has, the further its reducer could move theta."""
    door = Door(workload=Measuring(2.5))
    assert door.take_average("c", 4).is_taken
    event, is_taken = door.take_average("c", 5)
    reason = "the reducer's average is longer than its contributions allow"
    assert (event, is_taken) == (BadBlocks(ROUND.name, "c", 5, reason, reduced=True), False)
    assert door.take_average("a", 0, origin=Origin(reducer="a", signature=bytes(64))).is_taken, "another's"


def test_blocks_come_with_their_owners_signature_of_what_it_committed_to(door: Door) -> None:
    """Begin tells what each has committed to, and none of the signatures. The leader might have made it up."""
    del door.exchange.commitment  # it does not trust everybody any more
    other = round_among("abc", each=2, name=round_name(position=ROUND.name.position.model_copy(update={"index": 7})))
    refused = Admitted(BadBlocks(ROUND.name, "a", 2, "it has not signed its commitment"), is_taken=False)
    others = [
        commitment(ROUND, "c"),
        commitment(other, "a"),
        commitment(ROUND, "a", Contribution(digest=DIGEST, squares=1.0)),
    ]
    for signature in (None, bytes(64), *(one.signature for one in others)):
        assert Admission.take(door.admission, "a", ROUND.name, own(signature), DATA) == refused
    mine = commitment(ROUND, "a")
    assert door.take("a", 2, signature=mine.signature).is_taken
    event, _ = door.take("a", 3, GARBAGE, signature=mine.signature)
    assert isinstance(event, BadBlocks)
    assert event.evidence is not None
    assert event.evidence.commitment == mine, "it convicts its owner"


def own(signature: bytes | None) -> ChunkHeader:
    return ChunkHeader(chunk=2, reduced=False, absent=(), proof=PROOF, signature=signature)


def test_an_average_that_its_reducer_has_not_signed_is_its_senders_fault(door: Door) -> None:
    del door.exchange.is_vouched_for
    signed = signed_by(ROUND, "c", 4, DIGEST)
    bad = Admitted(BadBlocks(ROUND.name, "a", 4, "its reducer has not signed it", reduced=True), is_taken=False)
    assert door.take_average("a", 4, origin=None) == bad
    assert door.take_average("a", 4, b"B" * BLOCK, origin=signed.origin) == bad
    assert door.take_average("a", 4, absent=("b",), origin=signed.origin) == bad
    assert door.take_average("a", 4, origin=signed_by(ROUND, "a", 4, DIGEST).origin) == bad
    assert door.take_average("a", 4, origin=signed.origin).is_taken


@pytest.mark.parametrize("absent", [("a", "b", "c"), ("z",), ("a", "a"), ("b", "a"), ("c",)], ids=", ".join)
def test_an_average_lacks_blocks_of_other_members_than_its_reducer(door: Door, absent: tuple[str, ...]) -> None:
    del door.exchange.is_vouched_for
    origin = signed_by(ROUND, "c", 4, DIGEST, "".join(absent)).origin
    event, is_taken = door.take_average("c", 4, absent=absent, origin=origin)
    assert (event, is_taken) == (
        BadBlocks(ROUND.name, "c", 4, "its reducer has not signed it", reduced=True),
        False,
    )


def test_after_a_proposal_its_average_takes_the_place_of_another_one_and_no_other_does(door: Door) -> None:
    del door.exchange.is_vouched_for
    averages = [signed_by(ROUND, reducer, chunk, DIGEST) for chunk, reducer in enumerate("aabbcc")]
    heirs = signed_by(ROUND, "a", 4, digest_of(b"B" * BLOCK), "c")
    marks = b"".join(statement_of(ROUND, one).mark for one in [*averages[:4], heirs, averages[5]])
    assert door.take_average("c", 4, origin=averages[4].origin).is_taken
    door.exchange.proposed(marks)
    assert door.take_average("c", 4, b"C" * BLOCK, origin=averages[4].origin) == LATE, "it is not to come again"
    assert door.take_average("c", 4, origin=averages[4].origin) == LATE
    event, is_taken = door.take_average("c", 4, b"B" * BLOCK, absent=("c",), origin=heirs.origin)
    assert is_taken
    assert event == ReducedArrived(ROUND.name, "c", 4, ("c",))
    assert door.buffers.read(ROUND.name, 4, is_averaged=True) == b"B" * BLOCK


@pytest.mark.parametrize(
    ("chunk", "length", "reason"),
    [(SIZE.chunks, BLOCK, "no chunk 6"), (2, BLOCK + 1, f"not {BLOCK}"), (2, 0, f"not {BLOCK}")],
    ids=["one chunk more", "one byte more", "nothing"],
)
def test_what_is_no_whole_chunk_need_not_be_read(door: Door, chunk: int, length: int, reason: str) -> None:
    header = ChunkHeader(chunk=chunk, reduced=False, absent=())
    with pytest.raises(RemoteProtocolError, match=reason) as caught:
        door.admission.check_size("a", ROUND.name, header, length)
    assert caught.value.peer == "a"
