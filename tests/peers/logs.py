"""Logs that tests are built from: entries, and the certificates and farewells that prove them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from peers.log.certificate import (
    Ballot,
    Certificate,
    Choice,
    Departure,
    Group,
    Phase,
    Support,
    certify,
    digest_of_group,
    electorate,
    position_of,
)
from peers.log.chain import Chain, Entry
from peers.log.header import Fault, Header, Member
from peers.log.settings import RunSettings, Timing
from peers.log.state import LogState
from peers.values.leases import SampleRange, sample_count
from peers.values.manifest import Amendment
from peers.values.wire import digest_of
from tests.simulator.simulated_keys import SimulatedKeys

RUN = "tiny"
MANIFEST = digest_of(b"manifest")
STATE = digest_of(b"state")
PAYLOAD = digest_of(b"payload")
TIMING = Timing(grace=30.0, round_timeout=20.0, partition_grace=100.0)
SETTINGS = RunSettings(
    RUN, MANIFEST, inner_steps=10, samples_per_lease=20, tokens_per_sample=5, minimum_peers=3, timing=TIMING
)
TOKENS = 100
"""Of a whole lease."""
LOG = SETTINGS.empty_log
CERTIFIED = Support(is_certified=True, signers=2)
Sign = Callable[[str, bytes], bytes]
"""Return a peer's signature of a text."""


def member(peer: str, start: int, stop: int, tokens: int | None = None) -> Member:
    """Return a peer's share in an entry, of whose samples by default all tokens count."""
    tokens = (stop - start) * LOG.tokens_per_sample if tokens is None else tokens
    return Member(peer=peer, tokens=tokens, samples=(SampleRange(start, stop),))


def next_header(
    log: LogState,
    roster: Sequence[Member],
    payload: bytes = PAYLOAD,
    faults: Sequence[Fault] = (),
    gone: Sequence[str] = (),
    amendment: Amendment | None = None,
    leader: str | None = None,
) -> Header:
    """Return the next entry, led by default by the peer whose turn it is, and the first one by its first member."""
    if leader is None and log.closes:
        leader = log.leader_of(0) or roster[0].peer
    return log.next_header(roster, payload, leader, faults, gone, amendment)


def newcomer(log: LogState, peer: str, grant: int = 0) -> Member:
    """Return a member without a lease that trained all of one of the grants."""
    samples = log.grants[grant]
    tokens = sample_count(samples) * log.tokens_per_sample
    return log.expected(peer).model_copy(update={"tokens": tokens, "samples": samples if log.closes else ()})


def first_log(empty: LogState = LOG) -> LogState:
    """a, b and c have made the first entry; each has a lease of 20 samples, from 60, 80 and 100 on."""
    roster = [member(peer, 20 * place, 20 * place + 20) for place, peer in enumerate("abc")]
    return empty.append(next_header(empty, roster))


def log_at(index: int, names: str = "abc") -> LogState:
    """Return the log after so many entries that all of these took part in."""
    log = LOG
    while log.position.index < index:
        grants = iter(log.grants)
        leases = [log.leases.get(name) or next(grants) for name in names]
        members = [Member(peer=name, tokens=TOKENS, samples=lease) for name, lease in zip(names, leases, strict=True)]
        log = log.append(next_header(log, members))
    return log


def chain_of(headers: Iterable[Header], empty_log: LogState = LOG) -> Chain:
    """Consecutive entries, as a peer keeps them."""
    chain = Chain(empty_log)
    for header in headers:
        chain.add(Entry.whole(header, None))
    return chain


# What proves an entry -------------------------------------------------------------------------------------------
def signed(peer: str, text: bytes) -> bytes:
    return SimulatedKeys(peer).sign(text)


def choice_of(header: Header, view: int = 0, phase: Phase = Phase.COMMIT, group: Group = ()) -> Choice:
    """The header in the first attempt of a view."""
    ballot = Ballot(view=view, attempt=1)
    return Choice(ballot=ballot, phase=phase, header=header.digest, group=digest_of_group(group), justify=None)


def votes(
    choice: Choice, header: Header, voters: Iterable[tuple[str, int]], sign: Sign = signed
) -> dict[tuple[str, int], bytes]:
    """Return the signatures of a choice, by peer and incarnation."""
    return {voter: sign(voter[0], choice.text(position_of(header), voter[1])) for voter in voters}


def departed(peer: str, index: int, incarnation: int = 0, sign: Sign = signed) -> tuple[int, bytes]:
    """Return a farewell: from which index on a peer has voted nowhere, and its signature of that."""
    departure = Departure(run=RUN, peer=peer, incarnation=incarnation, index=index)
    return index, sign(peer, departure.text)


def certificate(
    log: LogState,
    header: Header,
    by: Iterable[str] | None = None,
    gone: Iterable[str] = (),
    sign: Sign = signed,
    view: int = 0,
) -> Certificate:
    """Return the certificate of the entry that follows `log`, signed by these, by default all its voters.

    Some have `gone` before it. If the others are no quorum, they are a minority that goes on alone.
    """
    incarnations = dict(electorate(log, header).voters)
    signers = [(peer, incarnations.get(peer, 0)) for peer in (incarnations if by is None else by)]
    left = {peer: departed(peer, header.index, incarnations[peer], sign) for peer in gone}
    for group in ((), tuple(signers)):
        choice = choice_of(header, view, group=group)
        found = certify(log, header, choice, group, votes(choice, header, signers, sign), left)
        if found is not None:
            return found
    raise AssertionError("an entry without signatures has no certificate")
