"""Messages: each kind comes back as it went, and nothing else comes in."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.log.header import FAULT_LIMIT, MEMBER_LIMIT
from peers.log.lineage import Lineage
from peers.presence.reachability import SEEN_LIMIT
from peers.protocol.chunk_sets import CHUNK_SET_BYTES, chunk_set, chunks_in
from peers.protocol.commitment import ChunkProof, Evidence
from peers.protocol.messages import (
    KINDS,
    Abort,
    Accuse,
    Adopt,
    Begin,
    Compare,
    Complete,
    Elsewhere,
    Excluded,
    Holding,
    Inquire,
    LeaseGrant,
    LeaseRequest,
    Leaving,
    Marked,
    Message,
    Prepared,
    Prove,
    Ready,
    Refuse,
    Unread,
    Waiting,
    Want,
)
from peers.protocol.packing import FIELDS, PLACE, RELATIVE, Packer, open_envelope, pack_message, unpack_message
from peers.protocol.rounds import Round, Share
from peers.protocol.signed_averages import Averaged, Origin
from peers.values.leases import SampleRange
from peers.values.wire import MESSAGE_LIMIT, PROTOCOL_VERSION, WireError
from tests.peers.builders import (
    PAYLOAD,
    RUN,
    STATE,
    attempt,
    commit,
    commitment,
    commitments,
    first_log,
    holders_of,
    holding,
    member,
    ready,
    round_of,
)

LOG = first_log()
HEADER = LOG.next_header([member("a", 60, 80), member("b", 80, 100)], PAYLOAD)
HELD = holding(HEADER, attempt(LOG), "a")
ROUND = round_of(attempt(LOG), HEADER.roster, lost=["b"])
EVIDENCE = Evidence(
    commitment=commitment("b", 0, LOG.position),
    chunk=5,
    proof=ChunkProof(squares=0.5, path=bytes(80)),
    data=bytes(range(256)),
)
MESSAGES: tuple[Message, ...] = (
    LeaseRequest(position=LOG.position, state_digest=STATE, relayed=("b",), unreached=("c",)),
    LeaseGrant(position=LOG.position, samples=(SampleRange(1, 2),), steps=3),
    ready(
        LOG,
        "a",
        held=HELD,
        round=ROUND,
        rate=10**9,
        relayed=("b",),
        unreached=("c",),
        seen=(("b", 5),),
        unproven=(bytes(32),),
    ),
    Begin(attempt=attempt(LOG, 2), round=ROUND, seconds=12.5, open=True, commitments=commitments(ROUND)),
    Adopt(attempt=attempt(LOG, 2), header=HEADER, holders=holders_of(HELD, "ac"), seconds=12.5),
    Holding(attempt=attempt(LOG), chunks=chunk_set([0, 5, 300])),
    Want(attempt=attempt(LOG), reduced=chunk_set([1]), own=chunk_set([])),
    Waiting(attempt=attempt(LOG), missing=("b", "c"), moved=7, unreached=("c",)),
    Accuse(attempt=attempt(LOG), accused="b", reason="code -128"),
    Accuse(attempt=attempt(LOG), accused="b", reason="code -128", evidence=EVIDENCE),
    Accuse(
        attempt=attempt(LOG),
        accused="b",
        reason="two averages",
        average=Averaged(chunk=5, digest=PAYLOAD, absent=("c",), origin=Origin(reducer="b", signature=bytes(64))),
    ),
    Prove(position=LOG.position, fault="averages", proof=bytes(range(40))),
    Compare(attempt=attempt(LOG), marks=bytes(range(16))),
    Compare(attempt=attempt(LOG), marks=None),
    Marked(attempt=attempt(LOG), marks=bytes(range(16))),
    Prepared(attempt=attempt(LOG), payload=PAYLOAD, missed=(("b", 2),), entry=HEADER.digest),
    Complete(
        attempt=attempt(LOG), payload=PAYLOAD, missed=(("b", 2),), entry=HEADER.digest, signature=bytes(range(64))
    ),
    commit(LOG, HEADER),
    Abort(attempt=attempt(LOG), reason="time is up"),
    Refuse(position=LOG.position, state_digest=STATE, reason="no"),
    Excluded(position=LOG.position, reason="no data can be exchanged"),
    Inquire(position=LOG.position),
    Elsewhere(position=LOG.position),
    Leaving(position=LOG.position, incarnation=2**61, departure=1, signature=bytes(64)),
)


class AtLog:
    """A peer that is where the messages are about."""

    log = LOG
    lineage = Lineage(LOG)


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


def test_every_kind_is_here() -> None:
    assert {message.kind for message in MESSAGES} == set(KINDS)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_round_trip(message: Message) -> None:
    assert unpacked(packed(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_every_message_names_a_position(message: Message) -> None:
    assert message.position == LOG.position


def test_wrong_version_names_both() -> None:
    with pytest.raises(WireError, match=rf"version {PROTOCOL_VERSION + 1}\b.*version {PROTOCOL_VERSION}\b"):
        unpacked(msgpack.packb([PROTOCOL_VERSION + 1, RUN, "leaving", []]))


def test_another_run_is_refused() -> None:
    with pytest.raises(WireError, match="another run"):
        unpacked(pack_message("other", MESSAGES[-1], LOG))


@pytest.mark.parametrize("kind", ["no-such-kind", 7, None, ["leaving"], "x" * 1000], ids=lambda kind: str(kind)[:20])
def test_unknown_kind_is_refused(kind: object) -> None:
    with pytest.raises(WireError, match="unknown kind") as caught:
        unpacked(msgpack.packb([PROTOCOL_VERSION, RUN, kind, []]))
    assert len(str(caught.value)) < 200


def test_oversized_message_is_refused() -> None:
    with pytest.raises(WireError, match="exceed the limit"):
        unpacked(msgpack.packb([PROTOCOL_VERSION, RUN, "leaving", bytes(MESSAGE_LIMIT)]))


@pytest.mark.parametrize("envelope", [[], [PROTOCOL_VERSION, RUN, "leaving"], {}, 1, None], ids=repr)
def test_no_envelope_is_refused(envelope: object) -> None:
    with pytest.raises(WireError, match="envelope"):
        unpacked(msgpack.packb(envelope))


PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.sampled_from(MESSAGES), st.data())
def test_wrongly_typed_fields_are_refused(message: Message, data: st.DataObject) -> None:
    body = body_of(message)
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(PLAIN)
    with suppress(WireError):  # a value of the right type is fine
        unpacked(with_body(message, body))


@given(st.sampled_from([message for message in MESSAGES if type(message) in RELATIVE]), st.data())
def test_wrong_values_deep_inside_are_refused(message: Message, data: st.DataObject) -> None:
    body = body_of(message)
    inner = body
    while lists := [value for value in inner if isinstance(value, list) and value]:
        if inner is not body and data.draw(st.booleans()):
            break
        inner = data.draw(st.sampled_from(lists))
    inner[data.draw(st.integers(0, len(inner) - 1))] = data.draw(PLAIN | st.integers(0, 9) | st.just(2**62 - 1))
    with suppress(WireError):
        unpacked(with_body(message, body))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        unpacked(data)


@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_messages_never_crash(message: Message, data: st.DataObject) -> None:
    damaged = bytearray(packed(message))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(WireError):
        unpacked(bytes(damaged))


@pytest.mark.parametrize("incarnation", [-1, 2**62, "1", 1.0, True, None])
def test_an_incarnation_is_a_number(incarnation: object) -> None:
    assert "Ready.incarnation" in refused(ready(LOG, "a"), "incarnation", incarnation)


def test_reasons_are_one_printable_line() -> None:
    refuse = Refuse.model_construct(position=LOG.position, state_digest=STATE, reason="no\x1b[2J\nINFO all is well")
    understood = unpacked(packed(refuse))
    assert isinstance(understood, Refuse)
    assert understood.reason == "no [2J INFO all is well"


# Rounds and sets of chunks --------------------------------------------------------------------------------------
@given(st.sets(st.integers(0, 8 * CHUNK_SET_BYTES - 1), max_size=50))
def test_sets_of_chunks_come_back_as_they_went(chunks: set[int]) -> None:
    mask = chunk_set(chunks)
    assert chunks_in(mask) == sorted(chunks)
    assert len(mask) == (max(chunks) // 8 + 1 if chunks else 0), (
        "no longer than it must be: the same set, the same bytes"
    )
    message = Holding(attempt=attempt(LOG), chunks=mask)
    assert unpacked(packed(message)) == message


def refused(message: Message, field: str, value: object) -> str:
    """Why a message is dropped in which one field is packed as this."""
    body = body_of(message)
    body[PLACE + list(FIELDS[type(message)]).index(field)] = value
    with pytest.raises(WireError) as caught:
        unpacked(with_body(message, body))
    return str(caught.value)


def of(kind: type[Message]) -> Message:
    return next(message for message in MESSAGES if isinstance(message, kind))


@pytest.mark.parametrize(
    "mask", [bytes(CHUNK_SET_BYTES + 1), "text", [1, 2], None, 7], ids=lambda mask: repr(mask)[:10]
)
def test_a_set_of_chunks_is_a_mask_within_bounds(mask: object) -> None:
    assert "Holding.chunks" in refused(of(Holding), "chunks", mask)
    assert "Want.reduced" in refused(of(Want), "reduced", mask)
    assert "Want.own" in refused(of(Want), "own", mask)


NAME = [1, "a", False]
NOBODY: list[Any] = [[], [], [], [], [], [], []]
ALL: list[Any] = [[[0, 3]], [], [], [], [], [], []]
NEWCOMERS = [[0, "newcomer", None]] * (MEMBER_LIMIT + 1)


@pytest.mark.parametrize(
    ("round", "field"),
    [
        ([NAME, NOBODY, [], b"", [], [], None, STATE], "shares"),
        ([NAME, [[], NEWCOMERS, [], [], [], [], []], [1] * (MEMBER_LIMIT + 1), b"", [], [], None, STATE], "newcomers"),
        ([NAME, ALL, [1] * (MEMBER_LIMIT + 1), b"", [], [], None, STATE], "chunks"),
        ([NAME, ALL, [1, 1], b"", [], [], None, STATE], "2 parts for 3 members"),
        ([NAME, ALL, [1, 1, 1], b"\x08", [], [], None, STATE], "no place 3"),
        ([NAME, ALL, [1, 1, 1], bytes(MEMBER_LIMIT), [], [], None, STATE], "lost"),
        ([NAME, ALL, [1, 1, 1], ["a"], [], [], None, STATE], "lost"),
        ([NAME, ALL, [1, 1, -1], b"", [], [], None, STATE], "chunks"),
        ([NAME, ALL, [1, 1, True], b"", [], [], None, STATE], "chunks"),
        ([NAME, [[[0, 4]], [], [], [], [], [], []], [1] * 4, b"", [], [], None, STATE], "no places 0 to 4"),
        ([NAME, [[[0, 3]], [], [[3, 1]], [], [], [], []], [1] * 3, b"", [], [], None, STATE], "no place 3"),
        ([NAME, ALL, [1, 1, 1], b"", [], [], None], "needs 8 fields"),
        ([NAME, ALL, [1, 1, 1], b"", [], [3], None, STATE], "no place 3"),
        ([NAME, ALL, [1, 1, 1], b"", [], [0] * (2 * MEMBER_LIMIT + 1), None, STATE], "gone"),
        ([None, ALL, [1, 1, 1], b"", [], [], None, STATE], "name"),
        ([NAME, ALL, [1, 1, 1], b"", [], [], [1, 0.4, 0.9, b""], STATE], "amendment.signature"),
        ([NAME, ALL, [1, 1, 1], b"", [], [], None, b"short"], "committed"),
        (None, "round"),
    ],
)
def test_a_round_is_checked_field_by_field(round: object, field: str) -> None:
    assert field in refused(of(Begin), "round", round)
    if round is not None:
        assert field in refused(of(Ready), "round", round)


NAME = [1, "a", False]


@pytest.mark.parametrize(
    "holders",
    [
        [[[0, NAME, bytes(64)]] * (MEMBER_LIMIT + 1)],
        [[[3, NAME, bytes(64)]]],
        [[["", NAME, bytes(64)]]],
        [[[0, NAME, bytes(63)]]],
        [[[0, [1, "a"], bytes(64)]]],
        "ab",
    ],
    ids=lambda holders: str(holders)[:20],
)
def test_who_holds_an_entry_is_named_with_its_signature(holders: object) -> None:
    assert "Adopt.holders" in refused(of(Adopt), "holders", holders)


def test_an_entry_is_adopted_whole() -> None:
    assert "Adopt.header" in refused(of(Adopt), "header", None)
    previous, fragment, state, turnout, payload, *rest = body_of(of(Adopt))[PLACE + 1]
    assert "payload" in refused(of(Adopt), "header", [previous, fragment, state, turnout, payload[:31], *rest])
    assert "does not follow" in refused(of(Adopt), "header", [STATE, fragment, state, turnout, payload, *rest])
    assert "nobody" in refused(of(Adopt), "header", [previous, fragment, state, NOBODY, payload, *rest])
    assert "fragment 1" in refused(of(Adopt), "header", [previous, 1, state, turnout, payload, *rest])
    name, outcome, _ = body_of(of(Ready))[list(Ready.model_fields).index("held") + PLACE - 1]
    assert "Ready.held" in refused(of(Ready), "held", [name, outcome, bytes(63)])


@pytest.mark.parametrize(
    "missed",
    [[["b", -1]], [["b"]], [["b", 1, 1]], [["b", "1"]], [["b", 1]] * (MEMBER_LIMIT + 1), [[b"b", 1]], [[3, 1]]],
    ids=lambda missed: str(missed)[:12],
)
def test_who_missed_how_many_chunks_is_checked(missed: object) -> None:
    assert "Complete.missed" in refused(of(Complete), "missed", [missed])


def test_what_is_said_to_many_is_packed_once() -> None:
    packer = Packer(AtLog())
    first, second = (Elsewhere(position=LOG.position) for _ in range(2))
    assert packer.pack(first) is packer.pack(first)
    assert packer.unpack(packer.pack(of(Begin))) == of(Begin)
    assert packer.pack(second) == packer.pack(first)


@pytest.mark.parametrize("count", [-1, 2**62, 1.5, "1", True, None], ids=str)
def test_a_rate_is_a_count(count: object) -> None:
    assert "Ready.rate" in refused(of(Ready), "rate", count)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e9, float("nan"), float("inf"), "1", None], ids=str)
def test_a_time_limit_is_a_time(seconds: object) -> None:
    assert "Begin.seconds" in refused(of(Begin), "seconds", seconds)
    assert "Adopt.seconds" in refused(of(Adopt), "seconds", seconds)


@pytest.mark.parametrize(
    "peers",
    [
        [b"", ["a"] * (MEMBER_LIMIT + 1)],
        [b"", ["no peer's name!"]],
        [b"\x08", []],
        [bytes(MEMBER_LIMIT), []],
        "ab",
        7,
    ],
    ids=lambda it: str(it)[:12],
)
def test_who_is_not_reached_is_named(peers: object) -> None:
    assert "LeaseRequest.relayed" in refused(of(LeaseRequest), "relayed", peers)
    assert "LeaseRequest.unreached" in refused(of(LeaseRequest), "unreached", peers)
    assert "Ready.relayed" in refused(of(Ready), "relayed", peers)
    assert "Ready.unreached" in refused(of(Ready), "unreached", peers)
    assert "Waiting.unreached" in refused(of(Waiting), "unreached", peers)


@pytest.mark.parametrize("unproven", [[bytes(31)], [bytes(32)] * (FAULT_LIMIT + 1), ["b"]], ids=lambda it: str(it)[:9])
def test_what_lacks_is_checked(unproven: object) -> None:
    assert "Ready.unproven" in refused(of(Ready), "unproven", unproven)


@pytest.mark.parametrize(
    "seen", [[["b", 1]] * (SEEN_LIMIT + 1), [["b", -1]], [["b"]], [["b", "1"]], [[3, 1]]], ids=lambda it: str(it)[:9]
)
def test_what_was_seen_of_others_is_checked(seen: object) -> None:
    assert "Ready.seen" in refused(of(Ready), "seen", [seen])


@pytest.mark.parametrize("flag", [0, 1, "true", None])
def test_an_open_attempt_is_a_boolean(flag: object) -> None:
    assert "Begin.open" in refused(of(Begin), "open", flag)


def test_a_ready_is_small_in_a_large_swarm() -> None:
    """Only exceptions are named: of a thousand peers those that are not reached directly."""
    seen = tuple((f"{number:052}", 10**9) for number in range(SEEN_LIMIT))
    assert len(packed(ready(LOG, "a", seen=seen))) < 1000


def test_who_remains_in_a_round_is_who_is_not_lost() -> None:
    shares = tuple(
        Share(member=member(peer, 20 * place, 20 * place + 20), chunks=2) for place, peer in enumerate("abc")
    )
    whole = Round(name=attempt(LOG), shares=shares, lost=())
    assert (whole.peers, whole.remaining, whole.chunks) == (("a", "b", "c"), ("a", "b", "c"), 6)
    one_lost = whole.without(["b", "stranger"])
    assert (one_lost.remaining, one_lost.lost) == (("a", "c"), ("b",))
    assert one_lost.without(["a"]).lost == ("a", "b"), "in roster order, whoever was lost first"
    assert one_lost.name == whole.name


def test_who_is_in_no_chunk_is_not_in_the_entry() -> None:
    shares = tuple(
        Share(member=member(peer, 20 * place, 20 * place + 20), chunks=2) for place, peer in enumerate("abc")
    )
    whole = Round(name=attempt(LOG), shares=shares, lost=("b", "c"))
    roster = whole.entry_roster({"b": 6, "c": 5})
    assert [(one.peer, one.missed) for one in roster] == [("a", 0), ("c", 5)]
