"""The votes that one peer gives at one position, and its count of the other peers' votes.

The rules are in voting.py; this module applies them to messages. A vote is kept in the peer's record before it is sent.
Among a few members all hear all votes, and each assembles the certificates itself. Among many the leader does, and the
certificates go down a tree of members.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from peers.log.certificate import Ballot, Choice, Group, Phase, electorate, prove
from peers.log.header import Header
from peers.log.state import LogError, LogState
from peers.messages.messages import Certified, Propose, Vote
from peers.presence.presence import Presence
from peers.protocol.context import Answers, Context
from peers.protocol.effects import Dropped, Send
from peers.protocol.replica import Replica
from peers.protocol.voting import Cast, Refusal, Tally, VoterState, VotingPlace, vote_commit, vote_prepare

OPEN_LIMIT = 16
"""Maximum number of peers that all receive all votes. That saves one delay, and costs a number of messages that grows
with the square."""
FANOUT = 16
"""Members to which each member of a larger round forwards a certificate."""
REMEMBERED = 8
"""Maximum number of proposed headers whose votes are counted."""


class Voter:
    """One peer as a voter at one position. `prepared` is the newest prepared header that this peer knows; the whole
    run's count as newer than a minority's. `answers` limits this peer's answers to repeated votes."""

    def __init__(self, context: Context, presence: Presence, replica: Replica, log: LogState) -> None:
        self.prepared: Certified | None = None
        self.answers = Answers(context)
        self._context = context
        self._presence = presence
        self._replica = replica
        self._log = self._here = log
        # By digest: each proposed header, and the minority that votes on it; empty if the whole run votes.
        self._proposed: dict[bytes, tuple[Header, Group]] = {}
        self._tally = Tally(self.place)
        for vote in self._cast_before:
            self._tally.hear(context.me, vote)

    @property
    def place(self) -> VotingPlace:
        """The position as the voting rules need it: the log before the entry, with this peer's state digest, and this
        peer's keys."""
        return VotingPlace(self.here, self._context.keys)

    @property
    def here(self) -> LogState:
        """The log before the entry, with the digest of this peer's state; the same object until that digest changes."""
        if self._here.state != self._replica.state_digest:
            self._here = self._log.in_state(self._replica.state_digest)
        return self._here

    @property
    def state(self) -> VoterState | None:
        """This peer's votes at the position; None once it has left the run."""
        return self._context.votes.at(self._log.position)

    @property
    def lock(self) -> Certified | None:
        """The prepared header that binds this peer's votes at the position; None if there is none."""
        return self.state.lock if self.state else None

    @property
    def has_voted(self) -> bool:
        """True if this peer has voted at the position. A header that it voted for may then be committed."""
        return self.state is not None and bool(self.state.prepare or self.state.commit)

    # Own votes ------------------------------------------------------------------------------------------------
    def prepare(self, propose: Propose, leader: str, objection: Refusal | None) -> Refusal | None:
        """Give vote 1 for a proposal, unless this peer objects or a rule forbids the vote (R5). Return the refusal;
        None if this peer agrees. The vote of a peer that is no voter is not sent."""
        self._note(propose.header, propose.group)
        state = self.state
        if state is None:
            return Refusal.LEFT
        answer = vote_prepare(state, propose, self.place, objection)
        return self._cast(answer, propose.header, propose.group, leader)

    def commit(self, prepared: Certified, leader: str) -> bool:
        """Give vote 2 for a prepared header (R6). Return True if this peer has given the vote, now or earlier."""
        assert prepared.certificate is not None
        self._note(prepared.header, prepared.certificate.group)
        if self.prepared is None or choice_of(self.prepared).weight < choice_of(prepared).weight:
            self.prepared = prepared
        state = self.state
        header, group = prepared.header, prepared.certificate.group
        if state is None or not self.has_say(header, group):
            return False
        return self._cast(vote_commit(state, prepared, self.place), header, group, leader) is None

    def _cast(self, answer: Cast | Refusal, header: Header, group: Group, leader: str) -> Refusal | None:
        if isinstance(answer, Refusal):
            return answer
        if self.has_say(header, group) and answer.state != self.state:
            self._context.votes.cast(answer.state, *self._sends(answer.vote, header, group, leader))
        return None

    def has_say(self, header: Header, group: Group) -> bool:
        """Return True if this peer, in its present incarnation, is among the voters on the header."""
        return (self._context.me, self._context.incarnation) in electorate(self._log, header, group).voters

    def _sends(self, vote: Vote, header: Header, group: Group, leader: str) -> list[Send]:
        receivers = dict.fromkeys([self._context.me, leader])
        if all_hear_votes(self._log, header, group):
            receivers |= dict.fromkeys(audience(self._log, header, group))
        return [Send(peer, vote) for peer in receivers]

    def repeat(self, leader: str) -> None:
        """Send the leader this peer's last votes at the position again."""
        if leader != self._context.me:
            self._context.emit(*(Send(leader, vote) for vote in self._cast_before))

    @property
    def _cast_before(self) -> list[Vote]:
        """This peer's last votes at the position, if they are on the disk. An earlier start may have stored votes
        without sending them."""
        state = self.state if self._context.votes.are_kept else None
        return [vote for vote in (state.prepare, state.commit) if vote] if state else []

    # Others' votes --------------------------------------------------------------------------------------------
    def hear(self, sender: str, vote: Vote) -> Certified | None:
        """Count another peer's vote. Return the header with the certificate that this vote completes; None if it
        completes none."""
        if not self._may_count(sender, vote):
            return None
        self._tally.hear(sender, vote)
        return self._certified(vote.choice)

    def _may_count(self, sender: str, vote: Vote) -> bool:
        """Return True if the sender is a voter of the run, this peer itself, or any live peer. Live peers that are no
        voters of the run may vote as founders, or in a minority."""
        is_voter = self._log.last is not None and self._log.counts(sender, vote.incarnation)
        return is_voter or sender == self._context.me or self._presence.is_live(sender)

    def _note(self, header: Header, group: Group) -> None:
        self._proposed.pop(header.digest, None)
        self._proposed[header.digest] = header, group
        while len(self._proposed) > REMEMBERED:
            del self._proposed[next(iter(self._proposed))]

    def recount(self, choice: Choice) -> list[Certified]:
        """Return the header for which `choice` is vote 1: once with its prepare certificate, and once with its commit
        certificate, if enough votes for each have arrived. Votes may arrive before the header."""
        found = [self._certified(choice), self._certified(commit_of(choice))]
        return [certified for certified in found if certified]

    def _certified(self, choice: Choice) -> Certified | None:
        header, group = self._proposed.get(choice.header, (None, ()))
        if header is None or (choice.phase is Phase.PREPARE and not self.is_news(choice)):
            return None
        farewells = self._presence.membership.farewells(self._log)
        certificate = self._tally.certificate(header, choice, farewells, group)
        return Certified(header=header, certificate=certificate) if certificate else None

    def is_news(self, choice: Choice) -> bool:
        """Return True if the choice's ballot is later than that of the newest prepared header that this peer knows. All
        ballots of the whole run count as later than those of a minority."""
        return self.prepared is None or choice_of(self.prepared).weight < choice.weight

    def is_prepared(self, certified: Certified) -> bool:
        """Return True if `certified` has a valid prepare certificate of its header. Before the first entry the header
        must also have the minimum of members, or be a minority's, because founders certify themselves (R13)."""
        certificate, least = certified.certificate, self._context.settings.minimum_peers
        if certificate is None or not self.place.is_prepared(certified.header, certificate):
            return False
        return self._log.last is not None or certificate.choice.alone or len(certified.header.roster) >= least

    def proves(self, certified: Certified, sender: str) -> bool:
        """Return True if `certified` has a valid commit certificate of its header. Otherwise report the sender, and
        return False."""
        assert certified.certificate is not None
        # Until the digest of this peer's new state is known, check the header without it (`self.here` has an old one).
        here = self.here if self._replica.is_settled else self._log
        try:
            here.check_next(certified.header)
            prove(certified.certificate, here, certified.header, self._context.keys.verify)
        except LogError as error:
            self._context.emit(Dropped(sender, "certificate", str(error)))
            return False
        return True

    def pass_on(self, certified: Certified, leader: str | None, asked: Collection[str]) -> None:
        """Forward a certificate to this peer's children in a tree of the members. Few members need no tree, since all
        receive all votes: only the leader sends prepare certificates, to live members not `asked` for a vote."""
        assert certified.certificate is not None
        header, group, me = certified.header, certified.certificate.group, self._context.me
        members = audience(self._log, header, group)
        receivers: Sequence[str] = ()
        if leader is not None and not all_hear_votes(self._log, header, group):
            receivers = forward_to(me, leader, members)
        elif leader == me and choice_of(certified).phase is Phase.PREPARE:
            receivers = [peer for peer in members if peer not in asked and self._presence.is_live(peer)]
        self._context.emit(*(Send(peer, certified) for peer in receivers if peer != me))

    def has_committed(self, choice: Choice) -> bool:
        """Return True if this peer has given vote 2 for this choice."""
        state = self.state
        return state is not None and state.commit is not None and state.commit.choice == choice

    def voted_in(self, peer: str, ballot: Ballot, phase: Phase) -> bool:
        """Return True if the peer's newest vote in this phase is in this ballot."""
        return self._tally.ballot_of(peer, phase) == ballot


# Receivers of votes and certificates --------------------------------------------------------------------------
def choice_of(certified: Certified) -> Choice:
    """Return the object of the votes in a header's certificate: the header's digest in one ballot and phase."""
    assert certified.certificate is not None
    return certified.certificate.choice


def commit_of(choice: Choice) -> Choice:
    """Return the choice of phase 2 with the same ballot and header as a choice of phase 1."""
    return choice.model_copy(update={"phase": Phase.COMMIT, "justify": None})


def audience(log: LogState, header: Header, group: Group) -> tuple[str, ...]:
    """Return the peers that receive a header's votes and certificates: its members, and all voters on it."""
    return tuple(dict.fromkeys([*header.peers, *(peer for peer, _ in electorate(log, header, group).voters)]))


def all_hear_votes(log: LogState, header: Header, group: Group) -> bool:
    """Return True if the header's members and the voters on it are so few that all of them receive all votes."""
    return len(audience(log, header, group)) <= OPEN_LIMIT


def forward_to(me: str, leader: str, members: Sequence[str]) -> tuple[str, ...]:
    """Return the members to which `me` forwards a certificate: its children in a tree whose root is the leader."""
    order = [leader, *(peer for peer in members if peer != leader)]
    first = order.index(me) * FANOUT + 1 if me in order else len(order)
    return tuple(order[first : first + FANOUT])
