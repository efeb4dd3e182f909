"""Messages: each of the 14 kinds comes back as it went, within its bounds, and nothing else comes in."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.log.certificate import Phase
from peers.log.header import MEMBER_LIMIT
from peers.messages.averages import MARK_BYTES, MARKED
from peers.messages.chunk_sets import CHUNK_SET_BYTES, chunk_set
from peers.messages.commitment import Norms
from peers.messages.messages import (
    KINDS,
    PROOF_LIMIT,
    Begin,
    Certified,
    Elsewhere,
    Inquire,
    LeaseGrant,
    LeaseRequest,
    Leaving,
    Message,
    Part,
    Proof,
    Propose,
    Refuse,
    Unread,
    Want,
)
from peers.messages.packing import FIELDS, PLACE, open_envelope, pack_message, unpack_message
from peers.presence.reachability import SEEN_LIMIT
from peers.values.leases import PIECE_LIMIT, SampleRange
from peers.values.wire import MESSAGE_LIMIT, PROTOCOL_VERSION, WireError
from tests.peers.builders import (
    FIRST,
    averaged,
    begin_of,
    certified,
    choice,
    propose,
    ready,
    roster,
    round_of,
    vote,
)
from tests.peers.logs import PAYLOAD, RUN, STATE, first_log, next_header

LOG = first_log()
HEADER = next_header(LOG, roster(LOG))
ROUND = round_of(LOG)
LOCK = certified(LOG, HEADER, Phase.PREPARE)
LATER = FIRST.model_copy(update={"attempt": 2})
GROUP = (("a", 0), ("newcomer", 2**61))
MESSAGES: dict[str, Message] = {
    "LeaseRequest": LeaseRequest(position=LOG.position, state_digest=STATE),
    "LeaseGrant": LeaseGrant(position=LOG.position, samples=(SampleRange(1, 2),), steps=3),
    "Refuse": Refuse(position=LOG.position, state_digest=STATE, reason="no"),
    "Ready": ready(LOG, "a"),
    "Ready with all": ready(
        LOG,
        "a",
        round=ROUND.name,
        terms=ROUND.terms,
        lock=LOCK,
        rate=10**9,
        seen=(("b", 5),),
        relayed=("b",),
        unreached=("c", "newcomer"),
        refused=FIRST,
        reason="the voter does not have the payload",
        named=("c",),
        lacking=("a",),
        unproven=(bytes(32),),
    ),
    "Begin": begin_of(ROUND, LOG),
    "Begin with norms": begin_of(ROUND, LOG, commitments=(), norms=Norms(squares=(1.0, 2.0), rest=bytes(32))),
    "Begin alone, with heirs": begin_of(
        round_of(LOG, "ab", group=GROUP), LOG, LATER, heirs=(("a", "b"),), commitments=()
    ),
    "Part": Part(round=ROUND.name, averages=(averaged(ROUND, "b", 2), averaged(ROUND, "b", 3, absent="ac"))),
    "Want": Want(round=ROUND.name, averages=chunk_set([0, 5, 300]), blocks=chunk_set([])),
    "Propose": propose(HEADER, round=ROUND, marks=bytes(6 * MARK_BYTES)),
    "Propose, justified": propose(HEADER, LATER, LOCK.certificate, group=GROUP),
    "Vote": vote("a", LOG, choice(HEADER, Phase.PREPARE, group=GROUP)),
    "Certified": certified(LOG, HEADER),
    "Certified by nobody": Certified(header=HEADER, certificate=None),
    "Proof": Proof(position=LOG.position, fault="averages", proof=bytes(range(40))),
    "Inquire": Inquire(position=LOG.position),
    "Elsewhere": Elsewhere(position=LOG.position),
    "Leaving": Leaving(position=LOG.position, incarnation=2**61, departure=1, signature=bytes(64)),
}
each = pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())


def packed(message: Message) -> bytes:
    return pack_message(RUN, message, LOG)


def unpacked(data: bytes) -> Message | Unread | None:
    return unpack_message(RUN, data, LOG)


def body_of(message: Message) -> list[Any]:
    """What a message is packed as: its position, and then its other fields."""
    _, position, values = open_envelope(RUN, packed(message))
    return [position.index, position.head, position.fragment, *values]


def with_body(message: Message, body: object) -> bytes:
    envelope: bytes = msgpack.packb([PROTOCOL_VERSION, RUN, message.kind, body])
    return envelope


# What comes back ------------------------------------------------------------------------------------------------
def test_every_kind_is_here() -> None:
    assert {message.kind for message in MESSAGES.values()} == set(KINDS)
    assert len(KINDS) == 14


@each
def test_round_trip(message: Message) -> None:
    data = packed(message)
    assert unpacked(data) == message
    assert message.position == LOG.position
    assert len(data) <= MESSAGE_LIMIT


# What is refused at the envelope -----------------------------------------------------------------------------------
def test_another_version_is_refused_in_words_that_name_both() -> None:
    with pytest.raises(WireError, match=rf"version {PROTOCOL_VERSION + 1}\b.*version {PROTOCOL_VERSION}\b"):
        unpacked(msgpack.packb([PROTOCOL_VERSION + 1, RUN, "leaving", []]))


@pytest.mark.parametrize("other", ["other", "x" * 5000, 7, None, "es\x1bcape\n"], ids=lambda it: str(it)[:8])
def test_another_run_is_refused_in_words_that_name_both(other: object) -> None:
    with pytest.raises(WireError, match=rf"the message is of run .*, not of '{RUN}'") as caught:
        unpacked(msgpack.packb([PROTOCOL_VERSION, other, "leaving", []]))
    assert str(other)[:8].isprintable() <= (str(other)[:8] in str(caught.value))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("place", range(3))
def test_an_envelope_that_is_nested_as_deeply_as_can_be_is_refused(place: int) -> None:
    """No words can show such a value: that would be one call in another, a thousand times."""
    envelope: list[Any] = [PROTOCOL_VERSION, RUN, "leaving", []]
    parts = [msgpack.packb(part) for part in envelope]
    parts[place] = 1000 * b"\x91" + b"\xc0"
    with pytest.raises(WireError):
        unpacked(b"\x94" + b"".join(parts))


@pytest.mark.parametrize("kind", ["no-such-kind", 7, None, ["leaving"], "x" * 1000], ids=lambda kind: str(kind)[:20])
def test_an_unknown_kind_is_refused(kind: object) -> None:
    with pytest.raises(WireError, match="unknown kind") as caught:
        unpacked(msgpack.packb([PROTOCOL_VERSION, RUN, kind, []]))
    assert len(str(caught.value)) < 200


def test_an_oversized_message_is_refused() -> None:
    with pytest.raises(WireError, match="exceed the limit"):
        unpacked(msgpack.packb([PROTOCOL_VERSION, RUN, "leaving", bytes(MESSAGE_LIMIT)]))


@pytest.mark.parametrize("envelope", [[], [PROTOCOL_VERSION, RUN, "leaving"], {}, 1, None], ids=repr)
def test_no_envelope_is_refused(envelope: object) -> None:
    with pytest.raises(WireError, match="envelope"):
        unpacked(msgpack.packb(envelope))


@each
def test_a_body_has_its_fields_and_no_others(message: Message) -> None:
    body = body_of(message)
    for wrong in (body[:-1], [*body, None], {"position": body}, None):
        with pytest.raises(WireError, match="needs"):
            unpacked(with_body(message, wrong))


# What is refused field by field ------------------------------------------------------------------------------------
PEERS: list[object] = [
    [b"", ["a"] * (MEMBER_LIMIT + 1)],
    [b"", ["no peer's name!"]],
    [b"\x08", []],
    [bytes(MEMBER_LIMIT), []],
    "ab",
    7,
]
DIGESTS: list[object] = [b"", bytes(31), bytes(33), "text", 7]
COUNTS: list[object] = [-1, 2**62, 1.0, "1", True, None]
BALLOTS: list[object] = [[0, -1], [0], [0, 1, 2], [0, 2**62], [True, 1], "b", 7]
SIGNATURES: list[object] = [bytes(63), bytes(65), "s", None]
MASKS: list[object] = [bytes(CHUNK_SET_BYTES + 1), "text", [1, 2], None, 7]
NAMES: list[object] = [[[0, 1], 3], [[0, 1], ""], [[0, 1]], [0, "a"], "a"]
HEADERS: list[object] = [None, [], "header", [STATE] * 8]
WRONG: dict[tuple[str, str], list[object]] = {
    ("LeaseRequest", "state_digest"): DIGESTS,
    ("LeaseGrant", "samples"): [[], [[2, 1]], [[-1, 1]], [[0, 1, 2]], [[0, 1]] * (PIECE_LIMIT + 1), None],
    ("LeaseGrant", "steps"): COUNTS,
    ("Refuse", "state_digest"): DIGESTS,
    ("Refuse", "reason"): [None, 7, b"bytes"],
    ("Ready", "view"): COUNTS,
    ("Ready", "incarnation"): COUNTS,
    ("Ready", "state_digest"): DIGESTS,
    ("Ready", "tokens"): COUNTS,
    ("Ready", "samples"): [[[0, 0]], [[0, 1]] * (PIECE_LIMIT + 1), None],
    ("Ready", "wants"): COUNTS,
    ("Ready", "commitment"): [[bytes(32), float("nan"), 1, bytes(64)], [bytes(32), 1.0, 1], [b"", 1.0, 1, bytes(64)]],
    ("Ready", "round"): NAMES,
    ("Ready", "terms"): DIGESTS,
    ("Ready", "rate"): COUNTS,
    ("Ready", "seen"): [[[["b", 1]] * (SEEN_LIMIT + 1)], [[["b", -1]]], [[["b"]]], [[["b", "1"]]], [[[3, 1]]]],
    ("Ready", "relayed"): PEERS,
    ("Ready", "unreached"): PEERS,
    ("Ready", "lock"): [[None, None], [7], "lock"],
    ("Ready", "refused"): BALLOTS,
    ("Ready", "reason"): [None, 7, b"bytes"],
    ("Ready", "named"): PEERS,
    ("Ready", "lacking"): PEERS,
    ("Ready", "unproven"): [[bytes(31)], [bytes(32)] * 17, ["b"]],
    ("Begin", "ballot"): [*BALLOTS, None],
    ("Begin", "seconds"): [0.0, -1.0, 1e9, float("nan"), float("inf"), "1", None],
    ("Begin", "heirs"): [[[[0]]], [[[0, 3]]], [[[0, 1]] * (MEMBER_LIMIT + 1)], [[["", 1]]], "ab"],
    ("Begin", "norms"): [[], [[-1.0], bytes(32)], [[1.0], bytes(31)], [[1.0] * (MEMBER_LIMIT + 1), bytes(32)], 1],
    ("Begin", "commitments"): [[[bytes(32), -1.0, 0]], [[bytes(32), 1.0, 0]] * (MEMBER_LIMIT + 1), None],
    ("Part", "round"): [*NAMES, None],
    ("Part", "averages"): [
        [[[-1, bytes(32), None, 1, bytes(64)]]],
        [[[0, bytes(31), None, 1, bytes(64)]]],
        [[[0, bytes(32), [b"\x08", []], 1, bytes(64)]]],
        [[[0, bytes(32), None, 3, bytes(64)]]],
        [[[0, bytes(32), None, 1, bytes(63)]]],
        [[[0, bytes(32), None, 1]]],
        None,
    ],
    ("Want", "round"): [*NAMES, None],
    ("Want", "averages"): MASKS,
    ("Want", "blocks"): MASKS,
    ("Propose", "ballot"): [*BALLOTS, None],
    ("Propose", "header"): HEADERS,
    ("Propose", "group"): [[[[3, 0]]], [[["a", -1]]], [[["a"]]], [[[0, 0]] * (MEMBER_LIMIT + 1)]],
    ("Propose", "justify"): [[], "certificate", 7],
    ("Propose", "round"): NAMES,
    ("Propose", "marks"): [bytes(MARKED * MARK_BYTES + 1), "text", None],
    ("Vote", "incarnation"): COUNTS,
    ("Vote", "choice"): [[], None, [[0, 1], 3, bytes(32), None, None], [[0, 1], 1, bytes(31), None, None]],
    ("Vote", "signature"): SIGNATURES,
    ("Certified", "header"): HEADERS,
    ("Certified", "certificate"): [[], "certificate", 7],
    ("Proof", "fault"): ["gossip", 7, None],
    ("Proof", "proof"): [bytes(PROOF_LIMIT + 1), "text", None],
    ("Leaving", "incarnation"): COUNTS,
    ("Leaving", "departure"): COUNTS,
    ("Leaving", "signature"): SIGNATURES,
}
"""By message and field: what none of them may be."""


@pytest.mark.parametrize(("kind", "field"), WRONG, ids=".".join)
def test_each_field_is_checked(kind: str, field: str) -> None:
    message = MESSAGES[kind]
    for value in WRONG[kind, field]:
        body = body_of(message)
        body[PLACE + list(FIELDS[type(message)]).index(field)] = value
        with pytest.raises(WireError, match=rf"{kind}\.{field}|exceed the limit") as caught:
            unpacked(with_body(message, body))
        assert len(str(caught.value)) < 500


def test_no_field_is_left_out() -> None:
    checked = {(kind, field) for kind, field in WRONG}
    fields = {(kind.__name__, field) for kind, forms in FIELDS.items() for field in forms}
    assert fields - checked == {("Begin", "round")}, "it has a test of its own"


@pytest.mark.parametrize("place", range(PLACE))
@each
def test_a_position_is_checked(message: Message, place: int) -> None:
    body = body_of(message)
    for wrong in (None, -1, "text", b"short", 1.5):
        with pytest.raises(WireError, match="Position"):
            unpacked(with_body(message, [*body[:place], wrong, *body[place + 1 :]]))


ALL: list[Any] = [[[0, 3]], []]
NOBODY: list[Any] = [[], []]
NAME: list[Any] = [[0, 1], "a"]
MANY = [[0, 1]] * (MEMBER_LIMIT + 1)


@pytest.mark.parametrize(
    ("round", "reason"),
    [
        ([NAME, NOBODY, [], STATE, []], "shares"),
        ([NAME, [MANY, []], [1] * (MEMBER_LIMIT + 1), STATE, []], "members"),
        ([NAME, [[[0, 3]], [[0, 1, 1, 0]] * (MEMBER_LIMIT + 1)], [1] * 3, STATE, []], "deviations"),
        ([NAME, ALL, [1] * (MEMBER_LIMIT + 1), STATE, []], "chunks"),
        ([NAME, ALL, [1, 1], STATE, []], "2 parts for 3 members"),
        ([NAME, ALL, [1, 1, -1], STATE, []], "chunks"),
        ([NAME, ALL, [1, 1, True], STATE, []], "chunks"),
        ([NAME, [[[0, 4]], []], [1] * 4, STATE, []], "places beyond the 3 peers"),
        ([NAME, [[[0, 3]], [[3, 1, 1, 0, 0]]], [1] * 3, STATE, []], "no member 3"),
        ([NAME, ALL, [1, 1, 1], STATE], "needs 5 fields"),
        ([NAME, ALL, [1, 1, 1], b"short", []], "committed"),
        ([NAME, ALL, [1, 1, 1], STATE, [[3, 0]]], "no place 3"),
        ([NAME, ALL, [1, 1, 1], STATE, [[0, 0]] * (MEMBER_LIMIT + 1)], "group"),
        ([None, ALL, [1, 1, 1], STATE, []], "name"),
        (None, "round"),
    ],
)
def test_a_round_is_checked_field_by_field(round: object, reason: str) -> None:
    message = MESSAGES["Begin"]
    body = body_of(message)
    body[PLACE + list(FIELDS[Begin]).index("round")] = round
    with pytest.raises(WireError, match=reason):
        unpacked(with_body(message, body))


def test_a_header_must_follow_from_the_log() -> None:
    """Its previous digest and its fragment are those of the position."""
    message = MESSAGES["Propose"]
    body = body_of(message)
    place = PLACE + list(FIELDS[Propose]).index("header")
    previous, fragment, state, turnout, payload, *rest = body[place]
    for header, reason in (
        ([STATE, fragment, state, turnout, payload, *rest], "does not follow"),
        ([previous, 1, state, turnout, payload, *rest], "fragment 1"),
        ([previous, fragment, state, NOBODY, payload, *rest], "has trained tokens"),
        ([previous, fragment, state, turnout, payload[:31], *rest], "payload"),
    ):
        body[place] = header
        with pytest.raises(WireError, match=reason):
            unpacked(with_body(message, body))
    assert (previous, payload) == (HEADER.previous, PAYLOAD)


def test_reasons_are_one_printable_line() -> None:
    refuse = Refuse.model_construct(position=LOG.position, state_digest=STATE, reason="no\x1b[2J\nINFO all is well")
    understood = unpacked(packed(refuse))
    assert isinstance(understood, Refuse)
    assert understood.reason == "no [2J INFO all is well"


# Anything at all ------------------------------------------------------------------------------------------------------
PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.sampled_from(list(MESSAGES.values())), st.data())
def test_wrong_values_at_any_depth_are_refused_or_read(message: Message, data: st.DataObject) -> None:
    body = body_of(message)
    inner = body
    while lists := [value for value in inner if isinstance(value, list) and value]:
        if data.draw(st.booleans()):
            break
        inner = data.draw(st.sampled_from(lists))
    inner[data.draw(st.integers(0, len(inner) - 1))] = data.draw(PLAIN | st.integers(0, 9) | st.just(2**62 - 1))
    with suppress(WireError):  # a value of the right type is fine
        unpacked(with_body(message, body))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        unpacked(data)


@given(st.sampled_from(list(MESSAGES.values())), st.data())
def test_mutated_bytes_are_refused_or_read(message: Message, data: st.DataObject) -> None:
    """What is read has passed every check, so that it can be packed again."""
    damaged = bytearray(packed(message))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)) | st.just(len(damaged)))
    try:
        read = unpacked(bytes(damaged[:cut]))
    except WireError:
        return
    if read is not None and not isinstance(read, Unread):
        assert unpacked(packed(read)) == read


def test_a_ready_is_small_in_a_large_swarm() -> None:
    """Only exceptions are named: of a thousand peers those that are not reached directly."""
    seen = tuple((f"{number:052}", 10**9) for number in range(SEEN_LIMIT))
    assert len(packed(ready(LOG, "a", seen=seen))) < 1000
