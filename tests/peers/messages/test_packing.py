"""Messages as bytes: what receivers elsewhere in the log read of them, and how large they are."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import msgpack
import pytest

from peers.log.certificate import Phase
from peers.log.header import MEMBER_LIMIT, Header, Member
from peers.log.lineage import RECENT_ENTRIES, Lineage
from peers.log.state import LogError, LogState
from peers.messages.averages import MARK_BYTES
from peers.messages.commitment import Contribution
from peers.messages.messages import Begin, Certified, Elsewhere, Inquire, Message, Unread
from peers.messages.packing import DEFLATED_FROM, RELATIVE, Packer, pack_message, unpack_message
from peers.messages.rounds import Round, RoundName, Share
from peers.presence.reachability import SEEN_LIMIT
from peers.values.leases import prefix, sample_count
from peers.values.wire import MESSAGE_LIMIT, PROTOCOL_VERSION, WireError, digest_of
from tests.peers.builders import FIRST, at_second, choice, propose, ready, round_of, sends, vote
from tests.peers.logs import LOG, RUN, SETTINGS, first_log, next_header
from tests.peers.messages.test_messages import HEADER, MESSAGES, each

HERE = first_log()
BEYOND = HERE.append(HEADER)


# Receivers elsewhere ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("log", [LOG, BEYOND, None], ids=["behind", "ahead", "without a log"])
@each
def test_elsewhere_the_position_is_read_and_what_needs_no_log(message: Message, log: LogState | None) -> None:
    read = unpack_message(RUN, pack_message(RUN, message, HERE), log)
    if type(message) not in RELATIVE:
        assert read == message
    elif isinstance(message, Certified):
        assert read is None, "it answers nothing that we asked here"
    else:
        assert read == Unread(position=message.position)


@each
def test_what_is_told_relative_to_a_log_is_not_told_without(message: Message) -> None:
    for log in (LOG, BEYOND, None):
        if type(message) in RELATIVE:
            with pytest.raises(LogError, match="not in this peer's recent log"):
                pack_message(RUN, message, log)
        else:
            assert pack_message(RUN, message, log) == pack_message(RUN, message, HERE)


def test_votes_are_told_in_full_so_that_they_are_evidence_anywhere() -> None:
    """R9: a vote that comes late, or about another branch, may convict its voter."""
    said = vote("a", HERE, choice(HEADER, Phase.PREPARE))
    assert unpack_message(RUN, pack_message(RUN, said, HERE), LOG) == said


def test_a_member_that_is_behind_is_told_what_followed() -> None:
    """Its message can't be read there: the position is enough."""
    rig = at_second()
    packer, late = Packer(rig.peer), LOG
    message = packer.unpack("c", pack_message(RUN, ready(late, "c"), late))
    assert message == Unread(position=late.position)
    [(to, told)] = sends(rig.hear("c", Unread(position=late.position)), Certified)
    assert (to, told.header) == ("c", rig.peer.log.last)
    assert unpack_message(RUN, packer.pack(told), late) == told
    unknown = BEYOND.position.model_copy(update={"index": 9})
    assert not sends(rig.hear("c", Unread(position=unknown)), Certified)


@dataclass
class AtEnd:
    log: LogState
    lineage: Lineage


@pytest.mark.parametrize("snapshot", [0, 3])
def test_entries_are_told_as_long_as_they_are_recent(snapshot: int) -> None:
    """Also the first after a snapshot; and not those of a lineage that was left."""
    logs = [LOG]
    for index in range(RECENT_ENTRIES + 10):
        roster = [Member(peer="a", tokens=100, samples=logs[-1].leases.get("a", LOG.grants[0]))]
        logs.append(logs[-1].append(next_header(logs[-1], roster, digest_of(b"%d" % index))))
    here = AtEnd(logs[snapshot], Lineage(logs[snapshot]))
    for log in logs[snapshot + 1 :]:
        assert log.last is not None
        here.log = log
        here.lineage.append(log.last, log)
        for past in (logs.index(log) - 1, max(snapshot, logs.index(log) - RECENT_ENTRIES)):
            told = Certified(header=_last(logs[past + 1]), certificate=None)
            assert unpack_message(RUN, Packer(here).pack(told), logs[past]) == told
    with pytest.raises(LogError):
        Packer(here).pack(Certified(header=_last(logs[len(logs) - RECENT_ENTRIES - 1]), certificate=None))
    here.lineage.move(HERE, ())
    here.log = HERE
    with pytest.raises(LogError):
        Packer(here).pack(ready(logs[-1], "a"))
    assert Packer(here).pack(ready(HERE, "a"))


def _last(log: LogState) -> Header:
    assert log.last is not None
    return log.last


def test_what_is_told_to_many_is_packed_once() -> None:
    packer = Packer(AtEnd(HERE, Lineage(HERE)))
    begin, propose_ = MESSAGES["Begin"], MESSAGES["Propose"]
    first = packer.pack(begin)
    assert packer.pack(propose_) is packer.pack(propose_.model_copy())
    assert packer.pack(begin.model_copy()) is first, "kinds do not push each other out"
    later = begin.model_copy(update={"seconds": 3.0})
    assert packer.unpack("a", packer.pack(later)) == later


def test_a_ready_that_is_said_again_is_read_once_and_anew_after_an_entry() -> None:
    here = AtEnd(HERE, Lineage(HERE))
    packer, said = Packer(here), pack_message(RUN, ready(HERE, "a"), HERE)
    first = packer.unpack("a", said)
    assert first == ready(HERE, "a")
    assert packer.unpack("a", said) is first
    assert packer.unpack("b", pack_message(RUN, ready(HERE, "b"), HERE)) == ready(HERE, "b")
    assert packer.unpack("a", pack_message(RUN, ready(HERE, "a", view=1), HERE)) == ready(HERE, "a", view=1)
    here.log = BEYOND
    assert packer.unpack("a", said) is not first


def test_a_message_about_two_positions_is_not_packed() -> None:
    elsewhere = round_of(BEYOND).name
    with pytest.raises(LogError, match="in a message about"):
        pack_message(RUN, ready(HERE, "a", round=elsewhere), HERE)


# Deflated bodies --------------------------------------------------------------------------------------------------
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
        unpack_message(RUN, msgpack.packb([PROTOCOL_VERSION, RUN, Inquire.kind, make()]), HERE)


def test_a_long_body_is_deflated() -> None:
    said = ready(HERE, "a", unreached=tuple(sorted(f"x{n:050}" for n in range(50))))
    assert len(pack_message(RUN, said, HERE)) < 50 * 50 / 2 > DEFLATED_FROM
    assert unpack_message(RUN, pack_message(RUN, said, HERE), HERE) == said
    assert len(pack_message(RUN, Elsewhere(position=HERE.position), HERE)) < 100


# Sizes ------------------------------------------------------------------------------------------------------------
NAMES = sorted(digest_of(b"%d" % number).hex()[:52] for number in range(MEMBER_LIMIT))


def crowd() -> LogState:
    """A thousand peers have made an entry; all want leases of other lengths."""
    draw = random.Random(1)
    log = SETTINGS.empty_log
    roster = [
        Member(peer=peer, tokens=sample_count(grant) * 5, samples=grant, wants=draw.randint(1, 20))
        for peer, grant in zip(NAMES, log.grants, strict=True)
    ]
    return log.append(next_header(log, roster))


CROWD = crowd()


def round_in(log: LogState, absent: int, unequal: int) -> Round:
    """A round of all but some, of whom some want other leases than last time; two thousand chunks are dealt anyhow."""
    draw = random.Random(2)
    members = [log.expected(peer) for peer in log.leases if draw.random() >= absent / MEMBER_LIMIT]
    members = [
        one.model_copy(update={"wants": draw.randint(1, 20)}) if draw.random() < unequal / MEMBER_LIMIT else one
        for one in members
    ]
    dealt = [0] * len(members)
    for _ in range(2000):
        dealt[draw.randrange(len(members))] += 1
    shares = tuple(Share(member=one, chunks=chunks) for one, chunks in zip(members, dealt, strict=True))
    return Round(name=RoundName(position=log.position, ballot=FIRST, leader=members[0].peer), shares=shares)


def contributed(round: Round) -> tuple[Contribution, ...]:
    """Return commitments that differ, so that they deflate no better than in life."""
    return tuple(
        Contribution(digest=digest_of(member.peer.encode()), squares=1.0 / (place + 1), number=1)
        for place, member in enumerate(round.contributors)
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
    header = next_header(CROWD, round.roster)
    seen = tuple((peer, 10**7) for peer in NAMES[:SEEN_LIMIT])
    marks = random.Random(3).randbytes(MARK_BYTES * 64)
    begin = Begin(ballot=FIRST, round=round, seconds=1.0, heirs=(), commitments=())
    messages: dict[str, tuple[Message, int]] = {
        "begin": (begin, for_round),
        "begin for a reducer": (
            begin.model_copy(update={"commitments": contributed(round)}),
            for_round + 47 * len(round.contributors),
        ),
        "propose": (propose(header, round=round, marks=marks), for_entry + 100 + len(marks)),
        "certified": (Certified(header=header, certificate=None), for_entry),
        "ready": (ready(CROWD, NAMES[3], seen=seen), 700),
        "ready in a round": (ready(CROWD, NAMES[3], round=round.name, terms=round.terms), 400),
        "vote": (vote(NAMES[5], CROWD, choice(header, Phase.PREPARE)), 250),
    }
    sizes = {name: size(message) for name, (message, _) in messages.items()}
    assert {name: (found, messages[name][1]) for name, found in sizes.items() if found > messages[name][1]} == {}


def test_a_newcomer_is_named() -> None:
    joined = Member(peer="newcomer", tokens=35, samples=prefix(CROWD.grants[2], 7))
    roster = (*(CROWD.expected(peer) for peer in NAMES[: MEMBER_LIMIT - 1]), joined)
    assert size(Certified(header=next_header(CROWD, roster), certificate=None)) < 300
