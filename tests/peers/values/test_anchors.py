"""What anchors have signed: what of it is believed, and what it says of branches."""

from __future__ import annotations

import itertools
import random

import pytest

from peers.values.anchors import (
    HEADS_LIMIT,
    KEPT,
    NO_ANCHORS,
    AnchoredHead,
    AnchoredHeads,
    AnchorError,
    Anchors,
)
from peers.values.identity import Identity
from peers.values.signing import IdentityKeys
from peers.values.wire import digest_of, pack
from tests.simulator.simulated_keys import SimulatedKeys

RUN = "tiny"
VERIFY = SimulatedKeys("any").verify
NOBODY = Anchors(RUN, ("one", "two"))


def name(text: str) -> bytes:
    return digest_of(text.encode())


def head(index: int, text: str = "ours", anchor: str = "one") -> AnchoredHead:
    return AnchoredHead.sign(RUN, index, name(f"{text} {index}"), anchor, SimulatedKeys(anchor))


def branch(end: int, text: str = "ours") -> dict[int, bytes]:
    return {index: name(f"{text} {index}") for index in range(1, end + 1)}


def test_a_head_is_signed_for_one_run_and_place() -> None:
    key = Identity.generate()
    signed = AnchoredHead.sign(RUN, 3, name("x"), key.peer_id, IdentityKeys(key))
    assert signed.is_signed(RUN)
    for other in ({"index": 4}, {"head": name("y")}, {"anchor": Identity.generate().peer_id}):
        assert not signed.model_copy(update=other).is_signed(RUN)
    assert not signed.is_signed("other")


def test_what_is_known_of_them_travels_as_bytes() -> None:
    known = NOBODY.with_heads([head(3), head(5, anchor="two")])
    assert NOBODY.taking(known.packed, VERIFY) == known
    assert (NO_ANCHORS.packed, NO_ANCHORS.digest) == (b"", b"")
    assert known.digest == NOBODY.taking(known.packed, VERIFY).digest != NOBODY.with_heads([head(3)]).digest
    assert known.newest_of("two") == head(5, anchor="two")
    assert known.newest_of("three") is None


@pytest.mark.parametrize(
    ("false", "reason"),
    [
        (head(3, anchor="zzz"), "zzz is no anchor of the run"),
        (head(3).model_copy(update={"index": 4}), "the signature of one at outer step 4 is not its own"),
    ],
)
def test_what_no_anchor_has_signed_is_not_taken(false: AnchoredHead, reason: str) -> None:
    with pytest.raises(AnchorError, match=reason):
        NOBODY.taking(pack(AnchoredHeads(heads=(head(2), false))), VERIFY)


@pytest.mark.parametrize("packed", [b"x", pack(AnchoredHeads(heads=())) * 9000], ids=len)
def test_what_is_no_list_of_heads(packed: bytes) -> None:
    with pytest.raises(AnchorError, match="they cannot be read"):
        NOBODY.taking(packed, VERIFY)


def test_too_many_heads_are_not_read() -> None:
    many = AnchoredHeads.model_construct(heads=tuple(head(index) for index in range(1, HEADS_LIMIT + 2)))
    with pytest.raises(AnchorError):
        NOBODY.taking(pack(many), VERIFY)


def test_of_each_key_the_newest_are_remembered() -> None:
    known = NOBODY.with_heads(head(index, anchor=key) for index in range(1, 100) for key in NOBODY.keys)
    assert [one.index for one in known.heads] == [*range(100 - KEPT, 100)] * 2
    assert known.with_heads([head(1)]) is known


def test_a_key_that_has_signed_two_heads_at_one_index_is_believed_no_further() -> None:
    """Whichever of them comes first; and the proof stays, and is passed on."""
    said = [head(3), head(4), head(5), head(5, "theirs"), head(8, "theirs")]
    for seed in range(20):
        random.Random(seed).shuffle(said)
        known = NOBODY
        for one in said:
            known = known.with_heads([one])
        assert known.liars == {"one": 5}
        assert [one.index for one in known.heads][-2:] == [5, 5]
        assert known.believed["one"] == (head(3), head(4))
    many = [head(index) for index in range(1, 10)] + [head(7, "theirs"), head(9, "theirs")]
    assert len(NOBODY.with_heads(many).heads) == KEPT + 2
    assert NOBODY.with_heads(many).believed["one"] == tuple(head(index) for index in range(3, 7))
    known = NOBODY.taking(NOBODY.with_heads(many).packed, VERIFY)
    assert known.with_heads([head(100)]).believed == known.believed, "nothing that it signs later"


def test_whoever_has_heard_of_the_same_knows_the_same() -> None:
    said = [head(3), head(5), head(7, anchor="two"), head(7, "theirs", "two"), head(2, anchor="two")]
    known = {NOBODY.with_heads(order).digest for order in itertools.permutations(said)}
    assert len(known) == 1


def test_of_two_signatures_of_one_head_all_keep_the_same() -> None:
    """Only the key itself can make a second one; whoever kept the other would be asked for it for ever."""
    one, other = (head(3).model_copy(update={"signature": bytes([byte]) * 64}) for byte in (1, 2))
    for first, second in ((one, other), (other, one)):
        assert NOBODY.with_heads([first]).with_heads([second]).heads == (one,)


# Branches -------------------------------------------------------------------------------------------------------
FIVE = NOBODY.with_heads([head(3), head(5)])


@pytest.mark.parametrize(
    ("end", "text", "after", "standing", "contradicted"),
    [
        (9, "ours", 0, (5, 0), None),
        (4, "ours", 0, (3, 0), None),
        (2, "ours", 0, (0, 0), None),
        (2, "theirs", 0, (0, 0), None),
        (4, "theirs", 0, (-1, 0), head(3)),
        (9, "theirs", 0, (-1, 0), head(3)),
        (9, "theirs", 3, (-1, 0), head(3)),
        (9, "theirs", 5, (0, 0), head(3)),
    ],
)
def test_what_a_key_says_of_a_branch(
    end: int, text: str, after: int, standing: tuple[int, ...], contradicted: AnchoredHead | None
) -> None:
    heads = branch(end, text)
    assert FIVE.standing(heads, after) == standing
    assert FIVE.contradiction(heads) == contradicted
    assert FIVE.vouched(heads) == max(0, FIVE.standing(heads)[0])


def test_places_that_are_not_known_say_nothing() -> None:
    assert FIVE.standing({4: name("x"), 9: name("y")}) == (0, 0)


def test_what_the_first_key_says_counts_first() -> None:
    known = NOBODY.with_heads([head(5), head(7, "theirs", "two")])
    assert known.contradiction(branch(9)) is None
    assert known.contradiction(branch(9, "theirs")) == head(5)
    assert known.standing(branch(9)) > known.standing(branch(9, "theirs"))
    assert known.contradiction(branch(4, "theirs") | {7: name("ours 7")}) == head(7, "theirs", "two")


def test_a_key_goes_by_those_before_it_alone() -> None:
    known = NOBODY.with_heads([head(5), head(7, "theirs", "two")])
    assert known.up_to("two") == known
    assert known.up_to("one") == Anchors(RUN, ("one",), (head(5),))


def test_a_key_that_has_signed_two_branches_at_different_places_prefers_neither() -> None:
    """No two of its heads are at one index, so that only the branches show it."""
    known = NOBODY.with_heads([head(5), head(7, "theirs")])
    assert known.standing(branch(9)) == known.standing(branch(9, "theirs")) == (-1, 0)
    assert known.with_heads([head(6, anchor="two")]).standing(branch(9)) > known.standing(branch(9, "theirs"))
