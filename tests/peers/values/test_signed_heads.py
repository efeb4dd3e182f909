"""What archives have signed: what of it is believed, and what it says of branches."""

from __future__ import annotations

import itertools
import random

import pytest

from peers.values.identity import Identity
from peers.values.signed_heads import (
    CONTRADICTED,
    HEADS_LIMIT,
    KEPT,
    NOTHING_SIGNED,
    HeadList,
    SignedHead,
    SignedHeads,
    SignedHeadsError,
    pack_heads,
    unpack_heads,
)
from peers.values.wire import digest_of, pack
from tests.simulator.simulated_keys import SimulatedKeys

RUN = "tiny"
VERIFY = SimulatedKeys("any").verify
NOBODY = SignedHeads(RUN, ("one", "two", "three"))


def name(text: str) -> bytes:
    return digest_of(text.encode())


def head(index: int, text: str = "ours", archive: str = "one") -> SignedHead:
    return SignedHead.sign(RUN, index, name(f"{text} {index}"), archive, SimulatedKeys(archive))


def branch(end: int, text: str = "ours") -> dict[int, bytes]:
    return {index: name(f"{text} {index}") for index in range(1, end + 1)}


def test_a_head_is_signed_for_one_run_and_place() -> None:
    key = Identity.generate()
    signed = SignedHead.sign(RUN, 3, name("x"), key.peer_id, key)
    assert signed.is_signed(RUN)
    for other in ({"index": 4}, {"head": name("y")}, {"archive": Identity.generate().peer_id}):
        assert not signed.model_copy(update=other).is_signed(RUN)
    assert not signed.is_signed("other")


def test_what_is_known_of_them_travels_as_bytes() -> None:
    known = NOBODY.with_heads([head(3), head(5, archive="two")])
    assert NOBODY.taking(unpack_heads(pack_heads(known.heads)), VERIFY) == known
    assert known.newest == head(5, archive="two")
    assert known.only("one").heads == (head(3),)
    assert NOTHING_SIGNED.newest is None


@pytest.mark.parametrize(
    ("false", "reason"),
    [
        (head(3, archive="zzz"), "zzz is not an archive of the run"),
        (head(3).model_copy(update={"index": 4}), "the signature of one at outer step 4 is not its own"),
    ],
)
def test_what_no_archive_has_signed_is_not_taken(false: SignedHead, reason: str) -> None:
    with pytest.raises(SignedHeadsError, match=reason):
        NOBODY.taking([head(2), false], VERIFY)


@pytest.mark.parametrize("packed", [b"", b"x", pack_heads([]) * 9000], ids=len)
def test_what_is_no_list_of_heads(packed: bytes) -> None:
    with pytest.raises(SignedHeadsError, match="they cannot be read"):
        unpack_heads(packed)


def test_too_many_heads_are_not_read() -> None:
    many = HeadList.model_construct(heads=tuple(head(index) for index in range(1, HEADS_LIMIT + 2)))
    with pytest.raises(SignedHeadsError):
        unpack_heads(pack(many))


def test_of_each_key_the_newest_are_remembered() -> None:
    known = NOBODY.with_heads(head(index, archive=key) for index in range(1, 100) for key in NOBODY.keys)
    assert [one.index for one in known.heads] == [*range(100 - KEPT, 100)] * 3
    assert known.with_heads([head(1)]) is known


def test_a_key_that_has_signed_two_heads_at_one_index_is_believed_no_further() -> None:
    """Whichever of them comes first; the proof stays, and another key that has signed one of the two is believed."""
    said = [head(3), head(4), head(5), head(5, "theirs"), head(8, "theirs"), head(5, archive="two")]
    for order in itertools.islice(itertools.permutations(said), 0, 720, 7):
        known = NOBODY
        for one in order:
            known = known.with_heads([one])
        assert known.disbelieved == {"one": 5}
        assert known.believed == (head(3), head(4), head(5, archive="two"))
    many = [head(index) for index in range(1, 10)] + [head(7, "theirs"), head(9, "theirs")]
    known = NOBODY.with_heads(many)
    assert len(known.heads) == KEPT + 2
    assert known.believed == tuple(head(index) for index in range(3, 7))
    assert NOBODY.taking(known.heads, VERIFY) == known
    assert known.with_heads([head(100)]).believed == known.believed, "nothing that it signs later"


def test_two_keys_that_contradict_each_other_are_believed_no_further() -> None:
    said = [head(3), head(5), head(8), head(5, "theirs", "two"), head(9, "theirs", "two"), head(9, archive="three")]
    for seed in range(20):
        random.Random(seed).shuffle(said)
        known = NOBODY
        for one in said:
            known = known.with_heads([one])
        assert known.disbelieved == {"one": 5, "two": 5}
        assert known.believed == (head(3), head(9, archive="three"))
    assert known.with_heads([head(9, "theirs")]).believed == known.believed, "it contradicts nobody any more"


# Branches -------------------------------------------------------------------------------------------------------
FIVE = NOBODY.with_heads([head(3), head(5, archive="two")])


@pytest.mark.parametrize(
    ("end", "text", "after", "standing", "contradicted"),
    [
        (9, "ours", 0, 5, None),
        (4, "ours", 0, 3, None),
        (2, "ours", 0, 0, None),
        (2, "theirs", 0, 0, None),
        (4, "theirs", 0, CONTRADICTED, head(3)),
        (9, "theirs", 0, CONTRADICTED, head(3)),
        (9, "theirs", 3, CONTRADICTED, head(3)),
        (9, "theirs", 5, 0, head(3)),
    ],
)
def test_what_archives_say_of_a_branch(
    end: int, text: str, after: int, standing: int, contradicted: SignedHead | None
) -> None:
    heads = branch(end, text)
    assert FIVE.standing(heads, after) == standing
    assert FIVE.contradiction(heads) == contradicted
    assert FIVE.vouched(heads) == max(0, FIVE.standing(heads))


def test_places_that_are_not_known_say_nothing() -> None:
    assert FIVE.standing({4: name("x"), 9: name("y")}) == 0


@pytest.mark.parametrize("archive", ["one", "two"])
def test_two_branches_that_are_both_signed_at_different_places_are_worth_the_same(archive: str) -> None:
    """By one key or by two: only the branches show the contradiction."""
    known = NOBODY.with_heads([head(5), head(7, "theirs", archive)])
    assert known.standing(branch(9)) == known.standing(branch(9, "theirs")) == CONTRADICTED
