"""Messages: each kind comes back as it went, and nothing else comes in."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.leases import SampleRange
from peers.messages import (
    KINDS,
    Abort,
    Accuse,
    Begin,
    Commit,
    Complete,
    Elsewhere,
    Held,
    Inquire,
    LeaseGrant,
    LeaseRequest,
    Leaving,
    Message,
    Refuse,
    Waiting,
    pack_message,
    unpack_message,
)
from peers.wire import MESSAGE_LIMIT, PROTOCOL_VERSION, WireError, to_plain
from tests.peers.builders import PAYLOAD, RUN, STATE, attempt, first_log, member, ready

LOG = first_log()
HEADER = LOG.next_header([member("a", 60, 80), member("b", 80, 100)], PAYLOAD)
HELD = Held(attempt=attempt(LOG), header=HEADER)
MESSAGES: tuple[Message, ...] = (
    LeaseRequest(position=LOG.position, state_digest=STATE),
    LeaseGrant(position=LOG.position, samples=(SampleRange(1, 2),), steps=3),
    ready(LOG, "a", held=HELD),
    Begin(attempt=attempt(LOG, 2), roster=HEADER.roster, adopted=HELD, holders=("a",)),
    Waiting(attempt=attempt(LOG), missing=("b", "c")),
    Accuse(attempt=attempt(LOG), accused="b", reason="code -128"),
    Complete(attempt=attempt(LOG), payload=PAYLOAD),
    Commit(header=HEADER),
    Abort(attempt=attempt(LOG), reason="time is up"),
    Refuse(position=LOG.position, reason="no"),
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
