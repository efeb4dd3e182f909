"""Messages: each kind comes back as it went, and nothing else comes in."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.log.header import MEMBER_LIMIT, Header
from peers.presence.reachability import SEEN_LIMIT
from peers.protocol.messages import (
    CHUNK_SET_BYTES,
    KINDS,
    Abort,
    Accuse,
    Adopt,
    Begin,
    Commit,
    Complete,
    Elsewhere,
    Excluded,
    Held,
    Holding,
    Inquire,
    LeaseGrant,
    LeaseRequest,
    Leaving,
    Message,
    Packer,
    Ready,
    Refuse,
    Round,
    Share,
    Waiting,
    Want,
    chunk_set,
    chunks_in,
    pack_message,
    unpack_message,
)
from peers.values.leases import SampleRange
from peers.values.wire import MESSAGE_LIMIT, PROTOCOL_VERSION, WireError, to_plain
from tests.peers.builders import PAYLOAD, RUN, STATE, attempt, first_log, member, ready, round_of

LOG = first_log()
HEADER = LOG.next_header([member("a", 60, 80), member("b", 80, 100)], PAYLOAD)
HELD = Held(attempt=attempt(LOG), header=HEADER)
ROUND = round_of(attempt(LOG), HEADER.roster, lost=["b"])
MESSAGES: tuple[Message, ...] = (
    LeaseRequest(position=LOG.position, state_digest=STATE, relayed=("b",), unreached=("c",)),
    LeaseGrant(position=LOG.position, samples=(SampleRange(1, 2),), steps=3),
    ready(LOG, "a", held=HELD, round=ROUND, rate=10**9, relayed=("b",), unreached=("c",), seen=(("b", 5),)),
    Begin(attempt=attempt(LOG, 2), round=ROUND, seconds=12.5, open=True),
    Adopt(attempt=attempt(LOG, 2), held=HELD, holders=("a", "c"), seconds=12.5),
    Holding(attempt=attempt(LOG), chunks=chunk_set([0, 5, 300])),
    Want(attempt=attempt(LOG), reduced=chunk_set([1]), own=chunk_set([])),
    Waiting(attempt=attempt(LOG), missing=("b", "c"), moved=7, unreached=("c",)),
    Accuse(attempt=attempt(LOG), accused="b", reason="code -128"),
    Complete(attempt=attempt(LOG), payload=PAYLOAD, missed=(("b", 2),)),
    Commit(header=HEADER),
    Abort(attempt=attempt(LOG), reason="time is up"),
    Refuse(position=LOG.position, reason="no"),
    Excluded(position=LOG.position, reason="no data can be exchanged"),
    Inquire(position=LOG.position),
    Elsewhere(position=LOG.position),
    Leaving(position=LOG.position, holds=False),
)


def test_every_kind_is_here() -> None:
    assert {message.kind for message in MESSAGES} == set(KINDS)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_round_trip(message: Message) -> None:
    assert unpack_message(RUN, pack_message(RUN, message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_every_message_names_a_position(message: Message) -> None:
    assert message.position == LOG.position


def test_wrong_version_names_both() -> None:
    with pytest.raises(WireError, match=rf"version 9\b.*version {PROTOCOL_VERSION}\b"):
        unpack_message(RUN, msgpack.packb([9, RUN, "leaving", []]))


def test_another_run_is_refused() -> None:
    with pytest.raises(WireError, match="another run"):
        unpack_message(RUN, pack_message("other", MESSAGES[-1]))


@pytest.mark.parametrize("kind", ["no-such-kind", 7, None, ["leaving"], "x" * 1000], ids=lambda kind: str(kind)[:20])
def test_unknown_kind_is_refused(kind: object) -> None:
    with pytest.raises(WireError, match="unknown kind") as caught:
        unpack_message(RUN, msgpack.packb([PROTOCOL_VERSION, RUN, kind, []]))
    assert len(str(caught.value)) < 200


def test_oversized_message_is_refused() -> None:
    with pytest.raises(WireError, match="exceed the limit"):
        unpack_message(RUN, msgpack.packb([PROTOCOL_VERSION, RUN, "leaving", bytes(MESSAGE_LIMIT)]))


@pytest.mark.parametrize("envelope", [[], [PROTOCOL_VERSION, RUN, "leaving"], {}, 1, None], ids=repr)
def test_no_envelope_is_refused(envelope: object) -> None:
    with pytest.raises(WireError, match="envelope"):
        unpack_message(RUN, msgpack.packb(envelope))


PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.sampled_from(MESSAGES), st.data())
def test_wrongly_typed_fields_are_refused(message: Message, data: st.DataObject) -> None:
    body = to_plain(message)
    assert isinstance(body, list)
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(PLAIN)
    with suppress(WireError):  # a value of the right type is fine
        unpack_message(RUN, msgpack.packb([PROTOCOL_VERSION, RUN, message.kind, body]))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        unpack_message(RUN, data)


@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_messages_never_crash(message: Message, data: st.DataObject) -> None:
    packed = bytearray(pack_message(RUN, message))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    with suppress(WireError):
        unpack_message(RUN, bytes(packed))


@pytest.mark.parametrize("incumbent", [0, 1, "true", None])
def test_a_flag_is_a_boolean(incumbent: object) -> None:
    body = to_plain(ready(LOG, "a"))
    assert isinstance(body, list)
    body[4] = incumbent
    with pytest.raises(WireError, match=r"Ready\.incumbent"):
        unpack_message(RUN, msgpack.packb([PROTOCOL_VERSION, RUN, "ready", body]))


def test_reasons_are_one_printable_line() -> None:
    refuse = Refuse.model_construct(position=LOG.position, reason="no\x1b[2J\nINFO all is well")
    understood = unpack_message(RUN, pack_message(RUN, refuse))
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
    assert unpack_message(RUN, pack_message(RUN, message)) == message


def refused(message: Message, place: int, value: object) -> str:
    """Why a message is dropped in which one field is this."""
    body = to_plain(message)
    assert isinstance(body, list)
    body[place] = value
    with pytest.raises(WireError) as caught:
        unpack_message(RUN, msgpack.packb([PROTOCOL_VERSION, RUN, message.kind, body]))
    return str(caught.value)


def of(kind: type[Message]) -> Message:
    return next(message for message in MESSAGES if isinstance(message, kind))


PLAIN_MEMBER = to_plain(HEADER.roster[0])
AN_ATTEMPT = to_plain(attempt(LOG))


@pytest.mark.parametrize(
    "mask", [bytes(CHUNK_SET_BYTES + 1), "text", [1, 2], None, 7], ids=lambda mask: repr(mask)[:10]
)
def test_a_set_of_chunks_is_a_mask_within_bounds(mask: object) -> None:
    assert "Holding.chunks" in refused(of(Holding), 1, mask)
    assert "Want.reduced" in refused(of(Want), 1, mask)
    assert "Want.own" in refused(of(Want), 2, mask)


@pytest.mark.parametrize(
    ("round", "field"),
    [
        ([AN_ATTEMPT, [], []], "shares"),
        ([AN_ATTEMPT, [[PLAIN_MEMBER, 1]] * (MEMBER_LIMIT + 1), []], "shares"),
        ([AN_ATTEMPT, [[PLAIN_MEMBER, 1]], ["a"] * (MEMBER_LIMIT + 1)], "lost"),
        ([AN_ATTEMPT, [[PLAIN_MEMBER, 1]], ["no peer's name!"]], "lost"),
        ([AN_ATTEMPT, [[PLAIN_MEMBER, -1]], []], "chunks"),
        ([AN_ATTEMPT, [[PLAIN_MEMBER, True]], []], "chunks"),
        ([AN_ATTEMPT, [[PLAIN_MEMBER]], []], "shares"),
        ([None, [[PLAIN_MEMBER, 1]], []], "name"),
        (None, "round"),
    ],
    ids=[
        "nobody",
        "too many",
        "too many lost",
        "no name",
        "less than none",
        "a flag",
        "half a share",
        "no name",
        "none",
    ],
)
def test_a_round_is_checked_field_by_field(round: object, field: str) -> None:
    assert field in refused(of(Begin), 1, round)
    if round is not None:
        assert field in refused(of(Ready), 7, round)


@pytest.mark.parametrize("holders", [[], ["a"] * (MEMBER_LIMIT + 1), [""], "ab"], ids=lambda holders: str(holders)[:10])
def test_an_entry_is_adopted_from_somebody(holders: object) -> None:
    assert "Adopt.holders" in refused(of(Adopt), 2, holders)


def test_an_entry_is_adopted_whole() -> None:
    assert "Adopt.held" in refused(of(Adopt), 1, None)
    assert "payload" in refused(of(Adopt), 1, to_plain(HELD.model_copy(update={"header": short_header()})))


def short_header() -> Header:
    return HEADER.model_copy(update={"payload": bytes(31)})


@pytest.mark.parametrize(
    "missed",
    [[["b", -1]], [["b"]], [["b", 1, 1]], [["b", "1"]], [["b", 1]] * (MEMBER_LIMIT + 1), [[1, "b"]]],
    ids=lambda missed: str(missed)[:12],
)
def test_who_missed_how_many_chunks_is_checked(missed: object) -> None:
    assert "Complete.missed" in refused(of(Complete), 2, missed)


def test_what_is_said_to_many_is_packed_once() -> None:
    packer = Packer(RUN)
    first, second = (Elsewhere(position=LOG.position) for _ in range(2))
    assert packer.pack(first) is packer.pack(first)
    assert unpack_message(RUN, packer.pack(of(Begin))) == of(Begin)
    assert packer.pack(second) == packer.pack(first)


@pytest.mark.parametrize("count", [-1, 2**62, 1.5, "1", True, None], ids=str)
def test_a_rate_is_a_count(count: object) -> None:
    assert "Ready.rate" in refused(of(Ready), 8, count)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e9, float("nan"), float("inf"), "1", None], ids=str)
def test_a_time_limit_is_a_time(seconds: object) -> None:
    assert "Begin.seconds" in refused(of(Begin), 2, seconds)
    assert "Adopt.seconds" in refused(of(Adopt), 3, seconds)


@pytest.mark.parametrize(
    "peers", [["a"] * (MEMBER_LIMIT + 1), ["no peer's name!"], "ab", None], ids=lambda it: str(it)[:9]
)
def test_who_is_not_reached_is_named(peers: object) -> None:
    assert "LeaseRequest.relayed" in refused(of(LeaseRequest), 2, peers)
    assert "LeaseRequest.unreached" in refused(of(LeaseRequest), 3, peers)
    assert "Ready.relayed" in refused(of(Ready), 10, peers)
    assert "Ready.unreached" in refused(of(Ready), 11, peers)
    assert "Waiting.unreached" in refused(of(Waiting), 3, peers)


@pytest.mark.parametrize(
    "seen", [[["b", 1]] * (SEEN_LIMIT + 1), [["b", -1]], [["b"]], [["b", "1"]]], ids=lambda it: str(it)[:9]
)
def test_what_was_seen_of_others_is_checked(seen: object) -> None:
    assert "Ready.seen" in refused(of(Ready), 12, seen)


@pytest.mark.parametrize("flag", [0, 1, "true", None])
def test_an_open_attempt_is_a_boolean(flag: object) -> None:
    assert "Begin.open" in refused(of(Begin), 3, flag)


def test_a_ready_is_small_in_a_large_swarm() -> None:
    """Only exceptions are named: of a thousand peers those that are not reached directly."""
    seen = tuple((f"{number:052}", 10**9) for number in range(SEEN_LIMIT))
    assert len(pack_message(RUN, ready(LOG, "a", seen=seen))) < 5000


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
