"""What this peer brings into an entry: what it says of it when it is ready, and whether a round takes it as it is."""

from __future__ import annotations

from peers.log.header import Member
from peers.log.state import LogError, LogState
from peers.presence.presence import Presence
from peers.protocol.acceptor import Acceptor
from peers.protocol.commitment import Author, Commitment, commit_to, digest_of_all
from peers.protocol.contributions import Contributions
from peers.protocol.desk import Desk
from peers.protocol.messages import Begin, Ready
from peers.protocol.minority import are_most
from peers.protocol.replica import Replica
from peers.protocol.rounds import Round, Stance
from peers.protocol.trainer import Trainer
from peers.protocol.weights import weights_of
from peers.values.chunks import Sum
from peers.values.workload import Trained


class Offer:
    """Of one slot, once the trainer is done."""

    def __init__(self, desk: Desk, presence: Presence, trainer: Trainer, replica: Replica, log: LogState) -> None:
        self._desk = desk
        self._presence = presence
        self._trainer = trainer
        self._replica = replica
        self._log = log
        self._trained: Trained | None = None
        self._made_at = desk.now
        self._wants = 0  # samples of the next lease; 0: a whole one
        self._signed: tuple[Stance, bytes] | None = None
        self._committed: tuple[Sum, Author, Commitment] | None = None
        self._heard: tuple[str, ...] = ()  # though the leader says that they are gone

    def make(self, trained: Trained) -> None:
        """Offer this, and decide how much to ask for next: a round must take all of the offer as it was made."""
        self._trained = trained
        self._made_at = self._desk.now
        self._wants = self._trainer.wants(self._presence.speeds(self._log))

    def ready(self, acceptor: Acceptor, round: Round | None, unproven: tuple[bytes, ...]) -> Ready:
        """What the leader is told. `round` is the one that we are in the middle of, `unproven` names the proofs that we
        lack of what the leader has begun."""
        trained, presence = self._trained, self._presence
        assert trained is not None
        commitment = self._commitment(trained.contribution, acceptor) if trained.tokens else None
        return Ready(
            position=self._log.position,
            state_digest=self._replica.state_digest,
            tokens=trained.tokens,
            samples=trained.samples,
            commitment=commitment,
            incarnation=self._desk.memory.incarnation,
            last_attempt=acceptor.last_attempt,
            held=acceptor.held,
            stance=self._stance(acceptor),
            round=round,
            rate=presence.rate,
            wants=self._wants,
            relayed=presence.named(presence.reachability.detours(self._desk.now)),
            unreached=presence.named(presence.unreached),
            seen=presence.reachability.seen(self._desk.me),
            unproven=unproven,
            heard=self._heard,
        )

    def _stance(self, acceptor: Acceptor) -> bytes:
        """Sign what we hold, and where we take part no more; once, for as long as it is the same."""
        said = Stance(
            position=self._log.position,
            peer=self._desk.me,
            incarnation=self._desk.memory.incarnation,
            last_attempt=acceptor.last_attempt,
            held=acceptor.held.header.digest if acceptor.held else None,
        )
        if self._signed is None or self._signed[0] != said:
            self._signed = said, self._desk.keys.sign(said.text)
        return self._signed[1]

    def _commitment(self, root: Sum | None, acceptor: Acceptor) -> Commitment | None:
        """Sign what the training came to, for the next attempt; once, for as long as that is the same."""
        if root is None:
            return None
        acceptor.commit(root)
        author = Author(
            peer=self._desk.me,
            incarnation=self._desk.memory.incarnation,
            position=self._log.position,
            after=acceptor.last_attempt,
        )
        if self._committed is None or self._committed[:2] != (root, author):
            self._committed = root, author, commit_to(root, author, self._desk.keys)
        return self._committed[2]

    def contributions(self, begin: Begin) -> Contributions:
        """Return what is known of the contributions to a round that begins, our own signature included."""
        signature = self._committed[2].signature if self._committed else None
        settings = self._desk.settings
        weights = weights_of(begin.round.contributors, self._log, settings)
        return Contributions.of(begin, settings.clip, weights, signature)

    def is_in(self, round: Round, alone: bool) -> bool:
        """Whether we take part in a round, a minority's if it is `alone`."""
        trained, me = self._trained, self._desk.me
        assert trained is not None
        if alone and not (self._desk.settings.goes_on_alone or are_most(self._log, round.peers)):
            return False
        mine = [member for member in round.roster if member.peer == me]
        offered = self._as_member(trained)
        return mine in ([offered], [self._as_it_counts(offered, round)]) and me not in round.lost

    def _as_it_counts(self, offered: Member, round: Round) -> Member:
        """Return what a round takes of our offer: while we are on probation, nothing beside others who are not."""
        others = [member for member in round.roster if member.peer != self._desk.me]
        return self._log.weighed([offered, *others])[0]

    def _as_member(self, trained: Trained) -> Member:
        return Member(
            peer=self._desk.me,
            tokens=trained.tokens,
            samples=trained.samples,
            wants=self._wants,
            incarnation=self._desk.memory.incarnation,
        )

    def objection(self, begin: Begin, ours: Round | None, acceptor: Acceptor) -> str | None:
        """Return why this peer takes no part in an attempt: it can lead to no entry, or is begun without proof; or goes
        on with a round that is not `ours` of this name, so that another entry would come of the same payload."""
        if begin.round.name.number > begin.attempt.number:
            return "its round has a later name than the attempt"
        if ours is not None and not ours.is_same(begin.round):
            return "it goes on with another round of the same name"
        if not self._can_lead_to_an_entry(begin.round):
            return "its attempt can lead to no entry"
        if objection := self._objection_to_minority(begin, ours):
            return objection
        self._heard = self._forgotten(begin) if ours is None else ()
        if self._heard:
            return f"it takes their say from {', '.join(self._heard)}, who are here"
        if ours is None and not self._knows_commitments(begin):
            return "it does not say what all members have committed to"
        if ours is None and not acceptor.may_enter(begin.round):
            return "this peer has been in that round, or in a later one"
        return None

    def _sees_most(self) -> bool:
        """Whether those here are no minority, as far as we see; for the partition grace we go by that."""
        is_early = self._desk.now - self._made_at < self._desk.settings.timing.partition_grace
        return is_early and self._presence.are_most_here(self._log, self._desk.memory.incarnation)

    def _objection_to_minority(self, begin: Begin, ours: Round | None) -> str | None:
        """Return why an attempt is no minority's, or its round is one and it is not. What a minority makes takes their
        say from all others, and is never certified."""
        remaining, round = set(begin.round.remaining), begin.round
        if round.name.alone != begin.attempt.alone and (ours is None or round.name.alone):
            return "its round is a minority's, and it is not, or it is the other way round"
        starts = [(member.peer, member.incarnation) for member in round.roster if member.peer in remaining]
        if begin.attempt.alone and (self._log.is_majority(starts) or self._sees_most()):
            return "it goes on alone, though most are here"
        return None

    def _forgotten(self, begin: Begin) -> tuple[str, ...]:
        """Return the voters that we hear, and that would have no say any more: they are said to be gone, or to have
        started again. Nobody but they themselves can bring that about."""
        if begin.attempt.alone or not self._log.closes or not self._log.voters:
            return ()
        incarnation, expiry = self._desk.memory.incarnation, self._desk.settings.timing.heartbeat_expiry
        here = self._presence.voters_here(self._log, incarnation, expiry)
        other = {one.peer for one in begin.round.roster if not self._log.counts(one.peer, one.incarnation)}
        return tuple(sorted(here & {*begin.round.gone, *other}))

    def _can_lead_to_an_entry(self, round: Round) -> bool:
        """Whether the round's roster follows from the log, and its parts are the payload."""
        try:
            round.entry(self._log, {}, self._log.position.head)  # any digest will do
        except LogError:
            return False
        reduces = {share.member.peer for share in round.shares if share.chunks}
        trained = {member.peer for member in round.roster if member.tokens}
        chunks = self._desk.payloads[self._log.fragment].size.chunks
        return round.chunks == chunks and reduces <= trained and not reduces <= set(round.lost)

    def _knows_commitments(self, begin: Begin) -> bool:
        """Return whether our own commitment is for this round, and a Begin says what all have committed to, and of us
        what we did. Who reduces nothing need not know. What others have signed, their chunks show."""
        me, contributors = self._desk.me, begin.round.contributors
        for member in contributors:
            if member.peer == me and (self._committed is None or self._committed[1] != begin.round.author(member)):
                return False
        if not any(share.chunks for share in begin.round.shares if share.member.peer == me):
            return True
        told = begin.commitments
        if len(told) != len(contributors) or digest_of_all(told) != begin.round.committed:
            return False
        ours = self._committed[2].contribution if self._committed else None
        said = {member.peer: known for member, known in zip(contributors, told, strict=True)}
        return said.get(me) == ours
