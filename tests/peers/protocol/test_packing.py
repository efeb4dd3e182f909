"""Messages as bytes: what receivers elsewhere in the log make of them, and how large they are."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import msgpack
import pytest

from peers.log.header import MEMBER_LIMIT, Member
from peers.log.lineage import RECENT_ENTRIES, Lineage
from peers.log.state import LogError, LogState
from peers.presence.reachability import SEEN_LIMIT
from peers.protocol.commitment import Contribution
from peers.protocol.messages import Adopt, Begin, Commit, Complete, Inquire, Message, Unread, Waiting
from peers.protocol.packing import DEFLATED_FROM, RELATIVE, Packer, pack_message, unpack_message
from peers.protocol.rounds import (
    Holder,
    Round,
    Share,
)
from peers.values.leases import prefix, sample_count
from peers.values.wire import MESSAGE_LIMIT, PROTOCOL_VERSION, WireError, digest_of
from tests.peers.builders import (
    LOG,
    PAYLOAD,
    RUN,
    SETTINGS,
    attempt,
    complete,
    first_log,
    holding,
    ready,
    sends,
    vote,
)
from tests.peers.protocol.test_messages import HEADER, MESSAGES
from tests.peers.protocol.test_peer import at_second

FIRST = first_log()
OTHER = FIRST.append(HEADER)


# Receivers elsewhere ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("log", [LOG, OTHER, None], ids=["behind", "ahead", "without a log"])
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_elsewhere_the_position_is_read_and_what_needs_no_log(message: Message, log: LogState | None) -> None:
    read = unpack_message(RUN, pack_message(RUN, message, FIRST), log)
    if type(message) not in RELATIVE:
        assert read == message
    elif isinstance(message, Commit):
        assert read is None, "it answers nothing that we asked here"
    else:
        assert read == Unread(position=message.position)


@pytest.mark.parametrize("message", [of for of in MESSAGES if type(of) in RELATIVE], ids=lambda message: message.kind)
def test_what_is_told_relative_to_a_log_is_not_told_without(message: Message) -> None:
    for log in (LOG, OTHER, None):
        with pytest.raises(LogError, match="not in our recent log"):
            pack_message(RUN, message, log)


def test_a_member_that_is_behind_is_told_what_followed() -> None:
    """Its message cannot be read: that is not needed."""
    rig = at_second()
    rig.see()
    packer = Packer(rig.peer)
    late = LogState(RUN, SETTINGS.manifest_digest, 20, 100, SETTINGS.staleness)
    message = packer.unpack(pack_message(RUN, ready(late, "c"), late))
    assert isinstance(message, Unread)
    assert message.position == late.position
    [(to, commit)] = sends(rig.hear("c", message), Commit)
    assert (to, commit.header) == ("c", rig.peer.log.last)
    assert unpack_message(RUN, packer.pack(commit), late) == commit
    assert sends(rig.hear("c", Unread(position=OTHER.position)), Commit) == [], "nothing is known of that"


def test_what_somebody_has_signed_is_read_a_moment_later_too() -> None:
    """It may contradict what was made."""
    rig = at_second()
    before = rig.peer.lineage.start(LOG.position.head)
    assert before is not None
    late = complete(rig.peer.lineage.entries[0], attempt(before), "c", missed=(("a", 1),))
    packed = pack_message(RUN, late, before)
    assert Packer(rig.peer).unpack(packed) == late
    rig.peer.lineage.move(FIRST, ())
    assert Packer(rig.peer).unpack(packed) == Unread(position=late.position)


@dataclass
class AtEnd:
    log: LogState
    lineage: Lineage


@pytest.mark.parametrize("snapshot", [0, 3])
def test_entries_are_told_as_long_as_they_are_recent(snapshot: int) -> None:
    """Also the first after a snapshot; and not those of a lineage that was left."""
    logs = [LOG]
    for index in range(RECENT_ENTRIES + 10):
        leases = logs[-1].leases or {"a": LOG.grants[0]}
        roster = [Member(peer="a", tokens=100, samples=leases["a"])]
        logs.append(logs[-1].append(logs[-1].next_header(roster, digest_of(b"%d" % index))))
    here = AtEnd(logs[snapshot], Lineage(logs[snapshot]))
    for log in logs[snapshot + 1 :]:
        assert log.last is not None
        here.log = log
        here.lineage.append(log.last, log)
        for past in (logs.index(log) - 1, max(snapshot, logs.index(log) - RECENT_ENTRIES)):
            followed = logs[past + 1].last
            assert followed is not None
            assert unpack_message(
                RUN, Packer(here).pack(Commit(header=followed, certificate=None)), logs[past]
            ) == Commit(header=followed, certificate=None)
    forgotten = logs[len(logs) - RECENT_ENTRIES - 1].last
    assert forgotten is not None
    with pytest.raises(LogError):
        Packer(here).pack(Commit(header=forgotten, certificate=None))
    here.lineage.move(FIRST, ())
    here.log = FIRST
    with pytest.raises(LogError):
        Packer(here).pack(ready(logs[-1], "a"))
    assert Packer(here).pack(ready(FIRST, "a"))


def test_what_is_told_to_many_is_packed_once() -> None:
    rig = at_second()
    packer = Packer(rig.peer)
    header = rig.peer.log.last
    assert header is not None
    told = [
        packer.pack(Commit(header=header, certificate=None)),
        packer.pack(ready(rig.peer.log, "a")),
        packer.pack(Commit(header=header, certificate=None)),
    ]
    assert told[0] is told[2]
    assert unpack_message(RUN, told[1], rig.peer.log) == ready(rig.peer.log, "a")
    later = ready(rig.peer.log, "a", last_attempt=3)
    assert unpack_message(RUN, packer.pack(later), rig.peer.log) == later


def test_a_message_about_two_positions_is_not_packed() -> None:
    other = holding(HEADER, attempt(OTHER), "a")
    with pytest.raises(LogError, match="in a message about"):
        pack_message(RUN, ready(FIRST, "a", held=other), FIRST)


# Deflated bodies --------------------------------------------------------------------------------------------------
def deflated(data: bytes) -> bytes:
    envelope: bytes = msgpack.packb([PROTOCOL_VERSION, RUN, Inquire.kind, data])
    return envelope


@pytest.mark.parametrize(
    "make",
    [
        lambda: b"",
        lambda: b"nonsense",
        lambda: zlib.compress(bytes(MESSAGE_LIMIT + 1)),
        lambda: zlib.compress(bytes(1 << 28), level=1),
        lambda: zlib.compress(b"\xc0") + b"more",
        lambda: zlib.compress(b"\xc0")[:-1],
        lambda: zlib.compress(b"\xc0"),
        lambda: zlib.compress(b"\xc1"),
    ],
    ids=["nothing", "nonsense", "too long", "a bomb", "and more", "cut short", "no list", "no msgpack"],
)
def test_what_does_not_inflate_to_a_body_is_refused(make: Callable[[], bytes]) -> None:
    with pytest.raises(WireError):
        unpack_message(RUN, deflated(make()), FIRST)


def test_a_long_body_is_deflated() -> None:
    waiting = Waiting(
        attempt=attempt(FIRST), missing=tuple(sorted(f"x{n:050}" for n in range(50))), moved=1, unreached=()
    )
    assert len(pack_message(RUN, waiting, FIRST)) < 50 * 50 / 2 > DEFLATED_FROM
    assert unpack_message(RUN, pack_message(RUN, waiting, FIRST), FIRST) == waiting


# Sizes ------------------------------------------------------------------------------------------------------------
NAMES = sorted(digest_of(b"%d" % number).hex()[:52] for number in range(MEMBER_LIMIT))


def crowd() -> LogState:
    """A thousand peers have made an entry; all want leases of other lengths."""
    draw = random.Random(1)
    log = SETTINGS.empty_log
    roster = [
        Member(peer=peer, tokens=sample_count(grant) * 100, samples=grant, wants=draw.randint(1, 20))
        for peer, grant in zip(NAMES, log.grants, strict=True)
    ]
    return log.append(log.next_header(roster, PAYLOAD))


CROWD = crowd()


def round_in(log: LogState, absent: int, unequal: int) -> Round:
    """A round of all but some, of whom some want other leases than last time; two thousand chunks are dealt anyhow."""
    draw = random.Random(2)
    members = [log.expected(peer) for peer in log.known if draw.random() >= absent / MEMBER_LIMIT]
    members = [
        one.model_copy(update={"wants": draw.randint(1, 20)}) if draw.random() < unequal / MEMBER_LIMIT else one
        for one in members
    ]
    dealt = [0] * len(members)
    for _ in range(2000):
        dealt[draw.randrange(len(members))] += 1
    shares = tuple(Share(member=one, chunks=chunks) for one, chunks in zip(members, dealt, strict=True))
    lost = tuple(one.peer for one in members[:7])
    return Round(name=attempt(log, leader=members[0].peer), shares=shares, lost=lost)


def contributed(round: Round) -> tuple[Contribution, ...]:
    """Of each something else, so that it deflates no better than in life."""
    return tuple(
        Contribution(digest=digest_of(peer.encode()), squares=1.0 / (place + 1))
        for place, peer in enumerate(member.peer for member in round.contributors)
    )


def size(message: Message) -> int:
    packed = pack_message(RUN, message, CROWD)
    assert unpack_message(RUN, packed, CROWD) == message
    return len(packed)


@pytest.mark.parametrize(
    ("absent", "unequal", "for_round", "for_entry"), [(0, 0, 800, 250), (20, 200, 1400, 700), (100, 1000, 2500, 1800)]
)
def test_what_is_said_to_a_thousand_members_is_small(absent: int, unequal: int, for_round: int, for_entry: int) -> None:
    round = round_in(CROWD, absent, unequal)
    header = CROWD.next_header(round.roster, PAYLOAD)
    held = holding(header, attempt(CROWD), NAMES[3])
    missing = tuple(sorted(round.peers[1:]))
    signed = tuple(
        Holder(peer=peer, attempt=held.attempt, signature=vote(header, held.attempt, peer)) for peer in missing
    )
    seen = tuple((peer, 10**7) for peer in NAMES[:SEEN_LIMIT])
    messages: dict[str, tuple[Message, int]] = {
        "begin": (Begin(attempt=attempt(CROWD, 2), round=round, seconds=1.0, open=False, commitments=()), for_round),
        "begin for a reducer": (
            Begin(attempt=attempt(CROWD, 2), round=round, seconds=1.0, open=False, commitments=contributed(round)),
            for_round + 46 * len(round.contributors),
        ),
        "commit": (Commit(header=header, certificate=None), for_entry),
        "adopt": (
            Adopt(attempt=attempt(CROWD, 2), header=header, holders=signed, seconds=1.0),
            for_entry + 110 * len(signed),
        ),
        "ready": (ready(CROWD, NAMES[3], seen=seen), 700),
        "in a takeover": (ready(CROWD, NAMES[3], held=held, round=round), for_round + for_entry + 170),
        "waiting": (Waiting(attempt=attempt(CROWD), missing=missing, moved=9, unreached=()), 350),
        "complete": (
            Complete(
                attempt=attempt(CROWD),
                payload=PAYLOAD,
                missed=((NAMES[5], 3),),
                entry=header.digest,
                signature=bytes(range(64)),
            ),
            250,
        ),
    }
    sizes = {name: size(message) for name, (message, _) in messages.items()}
    assert {name: (found, messages[name][1]) for name, found in sizes.items() if found > messages[name][1]} == {}


def test_a_newcomer_is_named() -> None:
    joined = Member(peer="newcomer", tokens=700, samples=prefix(CROWD.grants[2], 7))
    roster = (*(CROWD.expected(peer) for peer in NAMES[: MEMBER_LIMIT - 1]), joined)
    header = CROWD.next_header(roster, PAYLOAD)
    assert size(Commit(header=header, certificate=None)) < 300
