"""The product's own voting functions, in every order in which they can be called: no fork, and every liar convicted.

Votes and certificates, once signed, stay on the network for ever, and anybody may be shown any of them at any time: so
every loss, delay and order of messages is among what is explored. Leaders propose either of two headers in any ballot,
with any certificate that exists, or none. A voter that crashes comes back with its votes (R10), so a crash is a delay.
A liar signs whatever is of use: where a certificate lacks votes, it adds its own.

Some things keep it small, and none of them loses a case. What a voter has signed says all about it (`VoterState` is a
function of that), so the product is asked once for each such voter and message. Voters are interchangeable, and so are
the two headers. A voter's decisions do not depend on who signed a certificate (tests/peers/protocol/test_voting.py).
And without liars it does not matter which certificate a vote names: votes that name different ones are then counted
together, which allows more than can happen.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations

import pytest

from peers.audit.proofs import TwoVotes, Verifier, contradict
from peers.log.certificate import Ballot, Certificate, Choice, Group, Phase, digest_of_group
from peers.log.header import Member
from peers.log.state import Quorum
from peers.messages.messages import Certified, Propose, Vote
from peers.protocol.voting import (
    Cast,
    Tally,
    VoterState,
    VotingPlace,
    vote_commit,
    vote_prepare,
)
from peers.values.wire import digest_of
from tests.peers.logs import LOG, next_header
from tests.simulator.simulated_keys import SimulatedKeys

Commit = tuple[int, int]
"""A choice of phase 2: ballot and header (0 or 1; by a minority 2 or 3)."""
Prepare = tuple[int, int, Commit | None]
"""A choice of phase 1: ballot, header, and what the certificate that justifies it prepares."""
Signed = tuple[frozenset[Prepare], frozenset[Commit]]
"""All that one voter has signed."""
NOTHING: Signed = frozenset(), frozenset()


def mirrored(signed: Signed) -> Signed:
    """Return the same with the two headers exchanged."""
    prepares, commits = signed
    return (
        frozenset((ballot, header ^ 1, shown and (shown[0], shown[1] ^ 1)) for ballot, header, shown in prepares),
        frozenset((ballot, header ^ 1) for ballot, header in commits),
    )


@dataclass(frozen=True)
class World:
    """So many voters, the last of them liars, and so many ballots. `minorities`: votes of minorities, too, and every
    certificate of minorities that there could be."""

    voters: int
    ballots: int
    liars: int = 0
    quorum: Quorum = Quorum.MAJORITY
    minorities: bool = False

    def noted(self, prepare: Prepare) -> Prepare:
        """Return what is noted of a vote 1: of honest voters not which certificate it names."""
        return prepare if self.liars else (*prepare[:2], None)

    def __str__(self) -> str:
        besides = f", {self.liars} lying" * bool(self.liars) + ", minorities" * self.minorities
        return f"{self.voters} voters, {self.quorum}, {self.ballots} ballots{besides}"

    @property
    def names(self) -> str:
        return "abcdefg"[: self.voters]


class Product:
    """The product's answers to one voter, by what it has signed and what it is shown."""

    def __init__(self, world: World) -> None:
        roster = [Member(peer=peer, tokens=100, samples=LOG.grants[n]) for n, peer in enumerate(world.names)]
        empty = replace(LOG, quorum=world.quorum)
        log = empty.append(next_header(empty, roster))
        members = [log.expected(peer) for peer in log.roster]
        self.headers = [next_header(log, members, digest_of(bytes([number]))) for number in range(2)]
        self.log, self.world = log, world
        self.place = self.place_of("a")
        self.enough = next(n for n in range(1, 9) if n * 2 > world.voters and self.is_enough(n))
        self.states: dict[Signed, VoterState] = {NOTHING: VoterState(position=log.position, incarnation=0)}
        self.prepares: dict[Signed, dict[Prepare, Signed]] = {}
        self.commits: dict[Signed, dict[Commit, Signed]] = {}
        self._explore()

    def place_of(self, peer: str) -> VotingPlace:
        return VotingPlace(self.log, SimulatedKeys(peer))

    def is_enough(self, signers: int) -> bool:
        return self.certificate((0, 0, None), self.world.names[:signers]) is not None

    def group_of(self, header: int) -> Group:
        """Return whom a minority's choice names: as many as there are, so that its certificates weigh most."""
        return tuple((peer, 0) for peer in self.world.names) if header >= 2 else ()

    def choice(self, prepare: Prepare) -> Choice:
        number, header, justify = prepare
        return Choice(
            ballot=Ballot(view=number, attempt=1),
            phase=Phase.PREPARE,
            header=self.headers[header % 2].digest,
            group=digest_of_group(self.group_of(header)),
            justify=None if justify is None else Ballot(view=justify[0], attempt=1),
        )

    def commit_choice(self, commit: Commit) -> Choice:
        return self.choice((*commit, None)).model_copy(update={"phase": Phase.COMMIT})

    def vote(self, peer: str, choice: Choice) -> Vote:
        signature = SimulatedKeys(peer).sign(choice.text(self.log.position, 0))
        return Vote(position=self.log.position, incarnation=0, choice=choice, signature=signature)

    def certificate(self, prepare: Prepare, signers: str) -> Certificate | None:
        tally, choice = Tally(self.place), self.choice(prepare)
        for peer in signers:
            assert tally.hear(peer, self.vote(peer, choice))
        return tally.certificate(self.headers[prepare[1] % 2], choice, {}, self.group_of(prepare[1]))

    @cache  # noqa: B019
    def shown(self, prepare: Prepare) -> Certificate:
        certificate = self.certificate(prepare, self.world.names[: self.enough])
        assert certificate is not None
        return certificate

    def _explore(self) -> None:
        """Ask the product about everything that one voter may ever be shown, whether it can come about or not."""
        numbers, kinds = range(self.world.ballots), (0, 2) if self.world.minorities else (0,)
        commits = [(number, header + kind) for number in numbers for header in range(2) for kind in kinds]
        proposals: list[Prepare] = [(*commit, None) for commit in commits]
        for number, header in commits:
            shown = [(before, header % 2 + kind) for before in range(number) for kind in kinds if kind <= header]
            proposals += [(number, header, one) for one in shown]
        todo = [NOTHING]
        while todo:
            signed = todo.pop()
            state = self.states[signed]
            self.prepares[signed], self.commits[signed] = {}, {}
            for prepare in proposals:
                after = self._prepared(signed, state, prepare)
                if after is not None and after != signed:
                    self.prepares[signed][prepare] = after
            for commit in commits:
                after = self._committed(signed, state, commit)
                if after is not None and after != signed:
                    self.commits[signed][commit] = after
            new = {*self.prepares[signed].values(), *self.commits[signed].values()} - self.prepares.keys() - set(todo)
            todo += sorted(new, key=repr)

    def _prepared(self, signed: Signed, state: VoterState, prepare: Prepare) -> Signed | None:
        number, header, justify = prepare
        propose = Propose(
            ballot=Ballot(view=number, attempt=1),
            header=self.headers[header % 2],
            group=self.group_of(header),
            justify=None if justify is None else self.shown((*justify, None)),
            round=None,
        )
        answer = vote_prepare(state, propose, self.place)
        if not isinstance(answer, Cast):
            return None
        assert answer.vote.choice == self.choice(prepare)
        return self._note((signed[0] | {self.world.noted(prepare)}, signed[1]), answer.state)

    def _committed(self, signed: Signed, state: VoterState, commit: Commit) -> Signed | None:
        certified = Certified(header=self.headers[commit[1] % 2], certificate=self.shown((*commit, None)))
        answer = vote_commit(state, certified, self.place)
        if not isinstance(answer, Cast):
            return None
        assert answer.vote.choice == self.commit_choice(commit)
        return self._note((signed[0], signed[1] | {commit}), answer.state)

    def _note(self, signed: Signed, state: VoterState) -> Signed:
        """Remember the state of a voter that has signed all this: the same, whichever way led there; and honest."""
        known = self.states.setdefault(signed, state)
        assert (known.lock, known.promised, known.commit) == (state.lock, state.promised, state.commit)
        if not self.world.liars:
            return signed
        assert known.prepare == state.prepare
        choices = [*map(self.choice, signed[0]), *map(self.commit_choice, signed[1])]
        assert not any(self._contradict(one, other) for one, other in combinations(choices, 2)), "an honest voter"
        return signed

    def locked(self, signed: Signed) -> Commit | None:
        """Return what a voter has locked that has signed all this."""
        lock = self.states[signed].lock
        if lock is None:
            return None
        assert lock.certificate is not None
        locked = lock.certificate.choice
        return locked.ballot.view, self.headers.index(lock.header) + 2 * locked.alone

    @cache  # noqa: B019
    def agrees(self, signed: Signed, lock: Commit | None) -> bool:
        """Return whether a voter gives both votes in the next ballot, for what is locked, or for anything."""
        header = lock[1] if lock else 0
        again = self._prepared(signed, self.states[signed], (self.world.ballots, header, lock))
        if again is None:
            return False
        return self._committed(again, self.states[again], (self.world.ballots, header)) is not None

    @cache  # noqa: B019
    def _contradict(self, one: Choice, other: Choice) -> bool:
        return contradict(self.vote("a", one), self.vote("a", other))

    @cache  # noqa: B019
    def convicted(self, signed: Signed) -> bool:
        """Return whether the product convicts a liar that has signed all this."""
        liar = self.world.names[-1]
        choices = [*map(self.choice, sorted(signed[0], key=repr)), *map(self.commit_choice, sorted(signed[1]))]
        verifier = Verifier(self.log.run, self.place.keys.verify, payloads=())
        return any(
            TwoVotes(peer=liar, first=self.vote(liar, one), second=self.vote(liar, other)).convicts(verifier)
            for one, other in combinations(choices, 2)
        )


BITS = 20
"""Of a swarm's number, that each voter takes."""


@dataclass
class Search:
    """Every swarm that can come about. `goes_on`: also where a liar has convicted itself already.

    A swarm is one number, made of the numbers of what its honest voters have signed, and of what the liars have:
    millions of tuples would take several times the memory and the time.
    """

    world: World
    goes_on: bool = False
    forks: int = 0
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        product = self.product = Product(self.world)
        self.numbers: dict[Signed, int] = {}
        self.signed: list[Signed] = []
        self.mirror: list[int] = []
        for signed in product.states:
            self.number(signed)
        known = self.signed[: len(product.states)]
        self.prepares = [[(one, self.number(to)) for one, to in product.prepares[signed].items()] for signed in known]
        self.commits = [[(one, self.number(to)) for one, to in product.commits[signed].items()] for signed in known]

    def number(self, signed: Signed) -> int:
        """Return the number of what somebody has signed, and give one to its mirror image, too."""
        if signed not in self.numbers:
            for one in dict.fromkeys((signed, mirrored(signed))):
                self.numbers[one] = len(self.signed)
                self.signed.append(one)
            self.mirror += [self.numbers[mirrored(one)] for one in self.signed[len(self.mirror) :]]
        return self.numbers[signed]

    def swarm(self, honest: list[int], liar: int) -> int:
        """Return the number of a swarm: the same for all that differ in nothing but names."""
        mirror = self.mirror
        one, other = liar, mirror[liar]
        for number in sorted(honest):
            one = one << BITS | number
        for number in sorted([mirror[number] for number in honest]):
            other = other << BITS | number
        return min(one, other)

    def members(self, swarm: int) -> tuple[list[int], int]:
        honest = []
        for _ in range(self.world.voters - self.world.liars):
            honest.append(swarm & (1 << BITS) - 1)
            swarm >>= BITS
        return honest, swarm

    def run(self) -> Search:
        self.seen, todo = {0}, [0]
        while todo:
            honest, liar = self.members(todo.pop())
            self.check(honest, liar)
            if not self.goes_on and liar and self.product.convicted(self.signed[liar]):
                continue
            new = self.steps(honest, liar) - self.seen
            self.seen |= new
            todo += new
        return self

    def steps(self, honest: list[int], liar: int) -> set[int]:
        """Return what may come next: each voter votes for anything that it accepts, and that it can be shown."""
        proofs, after = self.prepared(honest, liar), set[int]()
        for place, number in enumerate(honest):
            others = honest[:place] + honest[place + 1 :]
            for (_, _, justify), to in self.prepares[number]:
                for lying in (liar,) if justify is None or justify[1] >= 2 else proofs.get(justify, ()):
                    after.add(self.swarm([*others, to], lying))
            for commit, to in self.commits[number]:
                for lying in (liar,) if commit[1] >= 2 else proofs.get(commit, ()):
                    after.add(self.swarm([*others, to], lying))
        return after

    def prepared(self, honest: list[int], liar: int) -> dict[Commit, set[int]]:
        """Return which headers can be shown to be prepared in which ballots, and what the liars have signed then."""
        counts: dict[Prepare, int] = {}
        for number in honest:
            for prepare in self.signed[number][0]:
                counts[prepare] = counts.get(prepare, 0) + 1
        proofs: dict[Commit, set[int]] = {}
        for prepare, count in counts.items():
            if count + self.world.liars >= self.product.enough:
                prepares, commits = self.signed[liar]
                lying = liar if count >= self.product.enough else self.number((prepares | {prepare}, commits))
                proofs.setdefault(prepare[:2], set()).add(lying)
        return proofs

    def check(self, honest: list[int], liar: int) -> None:
        """See that what is committed is one header; or else, that a liar is convicted by what it has signed."""
        counts: dict[Commit, int] = {}
        for number in honest:
            for commit in self.signed[number][1]:
                if commit[1] < 2:
                    counts[commit] = counts.get(commit, 0) + 1
        enough = self.product.enough
        committed = [commit for commit, count in counts.items() if count + self.world.liars >= enough]
        if len({header for _, header in committed}) < 2:
            return
        for one, other in combinations(committed, 2):
            if one[1] != other[1]:
                self.forks += 1
                prepares, commits = self.signed[liar]
                added = {commit for commit in (one, other) if counts[commit] < enough}
                votes = [self.signed[number] for number in honest]
                assert self.world.liars, f"a fork without liars: {votes}"
                assert self.product.convicted((prepares, commits | added)), f"a fork that convicts nobody: {votes}"


def states(world: World, goes_on: bool = False) -> Search:
    search = Search(world, goes_on).run()
    print(f"{world}: {len(search.seen):,} states, {search.forks:,} forks")
    return search


@pytest.mark.parametrize("ballots", [3, pytest.param(4, marks=pytest.mark.thorough)])
def test_three_honest_voters_never_fork(ballots: int) -> None:
    """R5, R6."""
    assert states(World(voters=3, ballots=ballots)).forks == 0


def test_one_liar_of_three_forks_the_log_and_is_convicted_each_time() -> None:
    """R9. Here all that can follow is explored, also after the liar has convicted itself."""
    assert states(World(voters=3, ballots=2, liars=1), goes_on=True).forks


def test_no_fork_comes_before_a_liar_has_convicted_itself() -> None:
    """R9, with one ballot more: two ballots lie between the commits of some forks."""
    assert states(World(voters=3, ballots=3, liars=1)).forks


@pytest.mark.thorough
def test_two_thirds_of_four_never_fork_with_one_liar() -> None:
    """R5, R6, R12."""
    world = World(voters=4, ballots=3, liars=1, quorum=Quorum.TWO_THIRDS)
    assert states(world, goes_on=True).forks == 0


@pytest.mark.parametrize(
    "world",
    [World(voters=2, ballots=2, minorities=True), World(voters=3, ballots=2, liars=1, minorities=True)],
    ids=str,
)
def test_minorities_change_nothing_of_that(world: World) -> None:
    """R5, R6, R8, R9."""
    assert bool(states(world).forks) is bool(world.liars)


@pytest.mark.parametrize(
    "world",
    [World(voters=3, ballots=3), World(voters=4, ballots=2, liars=1, quorum=Quorum.TWO_THIRDS)],
    ids=str,
)
def test_from_everywhere_a_leader_that_hears_a_quorum_makes_the_entry(world: World) -> None:
    """R4: it proposes the newest lock that any quorum of honest voters shows; and all of them give both votes."""
    search = Search(world, goes_on=True).run()
    product = search.product
    for swarm in search.seen:
        honest = [search.signed[number] for number in search.members(swarm)[0]]
        for quorum in combinations(honest, product.enough):
            locks = [lock for signed in quorum if (lock := product.locked(signed)) is not None]
            newest = max(locks, default=None)
            assert all(product.agrees(signed, newest) for signed in quorum), [product.states[one] for one in quorum]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "world",
    [
        World(voters=3, ballots=4, liars=1),
        World(voters=2, ballots=3, minorities=True),
        World(voters=3, ballots=2, minorities=True),
        World(voters=4, ballots=2, liars=1),
        World(voters=4, ballots=3),
        World(voters=5, ballots=2, liars=2),
        World(voters=5, ballots=3, liars=1, quorum=Quorum.TWO_THIRDS),
    ],
    ids=str,
)
def test_larger_swarms(world: World) -> None:
    """R5, R6, R9, R12. With fewer liars than a quorum has in common with another one there is no fork at all."""
    common = 2 * Product(world).enough - world.voters
    assert bool(states(world).forks) is (world.liars >= common)
