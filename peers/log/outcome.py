"""An entry in brief: what a peer that knows the log before it must be told to write down its header.

A header repeats what follows from the log: all names, what each peer was to train, and everybody's next lease. With a
thousand members these are 200 KB, of which a round decides little: which of the expected members are missing, who
joined, who trained something else than its lease, and the payload. An outcome says that much. It is meant for one
position: every peer that is there derives the same header from it, and no other peer can read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Annotated

from pydantic import Field, ValidationError

from peers.log.exclusions import Faults
from peers.log.header import MEMBER_LIMIT, Header, Member
from peers.log.state import LogError, LogState
from peers.values.amendments import Amendment
from peers.values.leases import prefix, sample_count
from peers.values.wire import Count, Digest, PeerId, Value

Column = Annotated[tuple[tuple[Count, Count], ...], Field(max_length=MEMBER_LIMIT)]
"""Numbers of some members: how many members stand between this one and the one named before, and its number."""
Places = Annotated[tuple[Count, ...], Field(max_length=2 * MEMBER_LIMIT)]
"""Of voters, in their order."""


class Newcomer(Value):
    """A member without a lease, at its place in the roster. It trained on one of the grants, or on nothing."""

    place: Count
    peer: PeerId
    grant: Count | None


class Turnout(Value):
    """A roster in brief.

    `known` are runs of places [first, last) among the peers that have a lease (`LogState.known`), in roster order.
    Newcomers stand between them. A member is taken to have trained all of its lease or grant, to state as many tokens
    as these samples have, to be missing in no chunk, to want as many samples as last time, and not to have started anew
    since. The columns name the members of which something else is true.
    """

    known: Annotated[tuple[tuple[Count, Count], ...], Field(max_length=MEMBER_LIMIT)]
    newcomers: Annotated[tuple[Newcomer, ...], Field(max_length=MEMBER_LIMIT)]
    samples: Column
    tokens: Column
    missed: Column
    wants: Column
    incarnation: Column

    def roster(self, log: LogState) -> tuple[Member, ...]:
        """Return the roster in full. Raises: LogError when it names members that are not there."""
        roster = self._expected(log)
        for place, count in _numbers(self.samples, len(roster)).items():
            samples = prefix(roster[place].samples, count)
            tokens = sample_count(samples) * log.tokens_per_sample
            roster[place] = _changed(roster[place], samples=samples, tokens=tokens)
        for name in ("tokens", "missed", "wants", "incarnation"):
            for place, number in _numbers(getattr(self, name), len(roster)).items():
                roster[place] = _changed(roster[place], **{name: number})
        return tuple(roster)

    def _expected(self, log: LogState) -> list[Member]:
        """The members, each as the log foresees it."""
        if sum(last - first for first, last in self.known) + len(self.newcomers) > MEMBER_LIMIT:
            raise LogError(f"a roster has at most {MEMBER_LIMIT} members")
        peers, roster = log.names, list[Member]()
        for first, last in self.known:
            if not first < last <= len(peers):
                raise LogError(f"there are no places {first} to {last} among {len(peers)} peers with a lease")
            roster += [log.expected(peer) for peer in peers[first:last]]
        for newcomer in self.newcomers:
            if newcomer.peer in log.known or newcomer.place > len(roster):
                raise LogError(f"{newcomer.peer} is no newcomer at place {newcomer.place}")
            roster.insert(newcomer.place, log.expected(newcomer.peer, newcomer.grant))
        return roster


class Outcome(Value):
    """The entry of a fragment that follows the head `previous`, in brief. `state` and `faults` as in the header.
    `gone` are the places of the voters that have no say any more, `amendment` is the one that it takes in."""

    previous: Digest
    fragment: Count
    state: Digest
    turnout: Turnout
    payload: Digest
    faults: Faults = ()
    gone: Places = ()
    amendment: Amendment | None = None


def turnout_of(log: LogState, roster: Sequence[Member]) -> Turnout:
    """Return a roster in brief. Raises: LogError when a member trained what was not for it."""
    runs, newcomers, expected = list[tuple[int, int]](), list[Newcomer](), list[Member]()
    for place, member in enumerate(roster):
        known = log.known.get(member.peer)
        grant = log.grant_of(member.samples) if known is None else None
        foreseen = log.expected(member.peer, grant)
        if known is None:
            newcomers.append(Newcomer(place=place, peer=member.peer, grant=grant))
        elif runs and runs[-1][1] == known:
            runs[-1] = (runs[-1][0], known + 1)
        else:
            runs.append((known, known + 1))
        expected.append(foreseen)
    trained, tokens = dict[int, int](), dict[int, int]()
    for place, (member, foreseen) in enumerate(zip(roster, expected, strict=True)):
        count, usual = sample_count(member.samples), foreseen.tokens
        if count != sample_count(foreseen.samples):
            trained[place], usual = count, count * log.tokens_per_sample
        if member.tokens != usual:
            tokens[place] = member.tokens
    turnout = Turnout(
        known=tuple(runs),
        newcomers=tuple(newcomers),
        samples=_column(trained),
        tokens=_column(tokens),
        missed=_column({place: one.missed for place, one in enumerate(roster) if one.missed}),
        wants=_unlike(roster, expected, "wants"),
        incarnation=_unlike(roster, expected, "incarnation"),
    )
    if turnout.roster(log) != tuple(roster):
        raise LogError("a member trained what was not for it")
    return turnout


def outcome_of(log: LogState, header: Header) -> Outcome:
    """Return an entry of the log's present cycle in brief. Raises: LogError when it does not follow from the log."""
    return _outcome_of(log.opening(header.fragment), header)


def header_of(log: LogState, outcome: Outcome) -> Header:
    """Return the entry of the log's present cycle that an outcome means. Raises: LogError when there is none."""
    if outcome.previous != log.position.head or outcome.fragment >= log.fragments:
        place = f"{outcome.previous.hex()[:8]}/{outcome.fragment}"
        raise LogError(f"an entry that follows {place} does not follow {log.position}")
    return _header_of(log.opening(outcome.fragment), outcome)


def follow(log: LogState, told: Header | Outcome) -> LogState:
    """Return the log with the entry that is told, as a header or in brief. Raises: LogError when there is none."""
    return log.append(told if isinstance(told, Header) else header_of(log, told))


@lru_cache(maxsize=8)
def _outcome_of(log: LogState, header: Header) -> Outcome:
    """One entry is told to all members, and written to the disk."""
    log.append(header)
    turnout = turnout_of(log, header.roster)
    return Outcome(
        previous=header.previous,
        fragment=header.fragment,
        state=header.state,
        turnout=turnout,
        payload=header.payload,
        faults=header.faults,
        gone=places_of(log.gone_in(header), log),
        amendment=log.taken_in(header),
    )


@lru_cache(maxsize=8)
def _header_of(log: LogState, outcome: Outcome) -> Header:
    """One entry is told by each of those who hold it."""
    roster, gone = outcome.turnout.roster(log), voters_at(outcome.gone, log)
    besides = outcome.faults, gone, outcome.amendment
    return log.in_state(outcome.state).next_header(roster, outcome.payload, *besides)


def places_of(voters: Iterable[str], log: LogState) -> tuple[int, ...]:
    """Return the places of these among the log's voters."""
    places = {peer: place for place, peer in enumerate(log.voters)}
    return tuple(places[peer] for peer in voters)


def voters_at(places: Sequence[int], log: LogState) -> tuple[str, ...]:
    """Return the voters at these places. Raises: LogError when there are not so many."""
    if any(place >= len(log.voters) for place in places):
        raise LogError(f"there is no place {max(places)} among {len(log.voters)} voters")
    return tuple(log.voters[place] for place in places)


def _column(numbers: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """Numbers by place, in the order of places."""
    places = list(numbers)
    return tuple((place - before - 1, numbers[place]) for before, place in zip([-1, *places], places, strict=False))


def _unlike(roster: Sequence[Member], expected: Sequence[Member], name: str) -> tuple[tuple[int, int], ...]:
    """The column of a field, with the members in which it is not as expected."""
    pairs = enumerate(zip(roster, expected, strict=True))
    return _column(
        {place: getattr(one, name) for place, (one, usual) in pairs if getattr(one, name) != getattr(usual, name)}
    )


def _numbers(column: Sequence[tuple[int, int]], members: int) -> dict[int, int]:
    """Return a column by place. Raises: LogError when a place is not among so many members."""
    places = [place - 1 for place in accumulate(gap + 1 for gap, _ in column)]
    if places and places[-1] >= members:
        raise LogError(f"there is no place {places[-1]} in a roster of {members}")
    return dict(zip(places, (number for _, number in column), strict=True))


def _changed(member: Member, **fields: object) -> Member:
    try:
        return Member(**{**member.__dict__, **fields})
    except ValidationError as error:
        raise LogError(f"{member.peer}: {error.errors()[0]['msg']}") from error
