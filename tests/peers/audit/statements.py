"""What peers sign, honest and not, as the tests of blame need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from peers.audit.evidence import Evidence
from peers.audit.proofs import TwoAverages, TwoCommitments, TwoVotes, Verifier, VoteAfterFarewell
from peers.log.certificate import Ballot, Certificate, Choice, Departure, Farewell, Phase, Signer, digest_of_group
from peers.log.header import Header, Member, Position
from peers.log.lineage import Lineage
from peers.log.state import LogState
from peers.messages.averages import Averaged, Origin, Statement
from peers.messages.commitment import Author, ChunkProof, Commitment, CommittedChunk, commit_to
from peers.messages.messages import Certified, Leaving, Proof, Vote
from peers.messages.rounds import Round, RoundName, Share
from peers.values.chunks import PayloadSize, Sum, SumTree
from peers.values.leases import SampleRange
from peers.values.wire import digest_of, pack
from peers.values.workload import Blocks, PayloadKind
from tests.peers.logs import RUN, SETTINGS, next_header
from tests.simulator.simulated_keys import SimulatedKeys

SIZE = PayloadSize(chunks=6, bytes=6000)
INCARNATION = 7
verify = SimulatedKeys("").verify


def inspect(chunk: int, data: Blocks, format: int = 0) -> float:
    """Return the squared norm of blocks that are taken for values."""
    return float(sum(value * value for value in data))


PAYLOADS = (PayloadKind(SIZE, inspect),)
VERIFIER = Verifier(RUN, verify, PAYLOADS)


# The log ---------------------------------------------------------------------------------------------------------
def log_of(peers: Sequence[str], empty: LogState = SETTINGS.empty_log) -> LogState:
    """Return the log after a first cycle of these peers; each has a lease."""
    log = empty
    for fragment in range(empty.fragments):
        place = log.of(fragment)
        roster = [
            Member(
                peer=peer,
                tokens=100,
                samples=(SampleRange(20 * n, 20 * n + 20),) if place.closes else (),
                incarnation=INCARNATION,
            )
            for n, peer in enumerate(peers)
        ]
        log = place.append(next_header(place, roster))
    return log


ABC = log_of("abc")


def header(number: int = 0, log: LogState = ABC, peers: Sequence[str] = ()) -> Header:
    members = [log.expected(peer) for peer in peers or log.roster]
    return next_header(log, members, digest_of(b"%d" % number))


A, B = header(0), header(1)


def lineage_of(log: LogState = ABC, entries: int = 0) -> Lineage:
    """Return a lineage that goes on for so many entries, in which all peers take part."""
    lineage = Lineage(log)
    for number in range(entries):
        entry = header(number, log)
        log = log.append(entry)
        lineage.append(entry, log)
    return lineage


def evidence(exclusion: int = 1000) -> Evidence:
    return Evidence(replace(SETTINGS, exclusion=exclusion), verify, PAYLOADS)


# Votes -----------------------------------------------------------------------------------------------------------
def choice(
    entry: Header, view: int, phase: Phase = Phase.PREPARE, justify: int | None = None, group: str = ""
) -> Choice:
    return Choice(
        ballot=Ballot(view=view, attempt=1),
        phase=phase,
        header=entry.digest,
        group=digest_of_group(named(group)),
        justify=None if justify is None else Ballot(view=justify, attempt=1),
    )


def named(group: str) -> tuple[tuple[str, int], ...]:
    return tuple((peer, INCARNATION) for peer in group)


def vote(peer: str, what: Choice, position: Position = ABC.position, incarnation: int = INCARNATION) -> Vote:
    signature = SimulatedKeys(peer).sign(what.text(position, incarnation))
    return Vote(position=position, incarnation=incarnation, choice=what, signature=signature)


def certified(
    entry: Header, what: Choice, signers: str, log: LogState = ABC, gone: str = "", group: str = ""
) -> Certified:
    """Return a certificate with signatures of these, however few, and farewells of those that are `gone`."""
    voters = dict(named(group) or log.electors)
    places = {peer: place for place, peer in enumerate(voters)}
    votes = tuple(
        Signer(place=places[peer], signature=vote(peer, what, log.position, voters[peer]).signature) for peer in signers
    )
    farewells = tuple(
        Farewell(place=places[peer], index=1, signature=leaving(peer, 1, voters[peer]).signature) for peer in gone
    )
    certificate = Certificate(choice=what, group=named(group), signers=votes, farewells=farewells)
    return Certified(header=entry, certificate=certificate)


def departure(peer: str, index: int, incarnation: int = INCARNATION, run: str = RUN) -> Departure:
    return Departure(run=run, peer=peer, incarnation=incarnation, index=index)


def leaving(peer: str, index: int, incarnation: int = INCARNATION) -> Leaving:
    signature = SimulatedKeys(peer).sign(departure(peer, index, incarnation).text)
    return Leaving(position=ABC.position, incarnation=incarnation, departure=index, signature=signature)


def two_votes(peer: str = "c", position: Position = ABC.position, seed: int = 0) -> TwoVotes:
    first, second = (vote(peer, choice(entry, seed), position) for entry in (A, B))
    return TwoVotes(peer=peer, first=first, second=second)


def vote_after_farewell(
    peer: str = "c", index: int = 1, incarnation: int = INCARNATION, run: str = RUN
) -> VoteAfterFarewell:
    left = departure(peer, index, incarnation, run)
    signature = SimulatedKeys(peer).sign(left.text)
    return VoteAfterFarewell(departure=left, signature=signature, vote=vote(peer, choice(A, 1)))


# The exchange ----------------------------------------------------------------------------------------------------
def round_of(log: LogState = ABC, view: int = 0, leader: str = "a") -> Round:
    """Return a round of all members, each of which averages two chunks."""
    name = RoundName(position=log.position, ballot=Ballot(view=view, attempt=1), leader=leader)
    return Round(name=name, shares=tuple(Share(member=log.expected(peer), chunks=2) for peer in log.roster))


ROUND = round_of()


def average(
    value: bytes,
    absent: tuple[str, ...] = (),
    by: str = "c",
    chunk: int = 4,
    round: Round = ROUND,
    incarnation: int = INCARNATION,
    reducer: str = "",
) -> Averaged:
    """Return an average that peer `by` has signed, as its own or as another `reducer`'s."""
    digest, owner = digest_of(value), reducer or by
    statement = Statement(
        round_name=round.name,
        terms=round.terms,
        reducer=owner,
        incarnation=incarnation,
        chunk=chunk,
        digest=digest,
        absent=absent,
    )
    origin = Origin(reducer=owner, signature=SimulatedKeys(by).sign(statement.text))
    return Averaged(chunk=chunk, digest=digest, absent=absent, origin=origin)


def two_averages(first: Averaged, second: Averaged, round: Round = ROUND) -> TwoAverages:
    return TwoAverages(round=round.name, terms=round.terms, incarnation=INCARNATION, first=first, second=second)


def author(
    peer: str = "c", position: Position = ABC.position, number: int = 0, incarnation: int = INCARNATION
) -> Author:
    return Author(peer=peer, incarnation=incarnation, position=position, number=number)


def commitment(value: bytes, whose: Author | None = None, squares: float = 1.0) -> Commitment:
    whose = whose or author()
    return commit_to(Sum(digest_of(value), squares), whose, SimulatedKeys(whose.peer))


def two_commitments(peer: str = "c", position: Position = ABC.position, seed: int = 0) -> TwoCommitments:
    whose = author(peer, position)
    first, second = (commitment(b"%d %d" % (seed, which), whose) for which in range(2))
    return TwoCommitments(author=whose, first=first, second=second)


def committed_chunk(is_honest: bool = False, whose: Author | None = None) -> CommittedChunk:
    """Return a chunk whose owner has committed to another norm than it has; if it is honest, to this one."""
    whose, data, chunk = whose or author(), b"blocks", 2
    leaves = [Sum(digest_of(bytes([place])), 1.0) for place in range(SIZE.chunks)]
    leaves[chunk] = Sum(digest_of(data), inspect(chunk, data) if is_honest else 1.0)
    tree = SumTree(leaves)
    said = commit_to(tree.root, whose, SimulatedKeys(whose.peer))
    proof = ChunkProof(squares=leaves[chunk].squares, path=tree.path(chunk))
    return CommittedChunk(commitment=said, chunk=chunk, proof=proof, data=data)


def shown(proof: TwoCommitments | TwoVotes, position: Position = ABC.position) -> Proof:
    return Proof(position=position, fault=proof.kind, proof=pack(proof))
