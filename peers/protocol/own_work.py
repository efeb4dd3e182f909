"""This peer's own work for one entry, and its Ready, which states that work to the leader (R14)."""

from __future__ import annotations

from dataclasses import dataclass

from peers.log.certificate import Ballot
from peers.log.header import MEMBER_LIMIT, Member
from peers.log.state import LogState
from peers.messages.commitment import Author, Commitment, Norms, commit_to
from peers.messages.messages import Begin, Ready
from peers.messages.rounds import Round
from peers.presence.presence import Presence
from peers.protocol.context import Context, Repetition
from peers.protocol.contributions import receivers_of_commitments
from peers.protocol.exchange import Exchange
from peers.protocol.trainer import Trainer, TrainerState
from peers.protocol.voter import Voter
from peers.protocol.voting import Refusal
from peers.values.chunks import Sum
from peers.values.workload import Trained


@dataclass(frozen=True)
class Objection:
    """The reason why this peer does not vote for the newest proposal, with the details that its Ready gives the
    leader."""

    refusal: Refusal
    named: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    unproven: tuple[bytes, ...] = ()


class OwnWork:
    """This peer's finished training for one entry, and the message (Ready) that tells the leader about it."""

    def __init__(self, context: Context, presence: Presence, trainer: Trainer, log: LogState) -> None:
        self.trained: Trained | None = None
        self.since: float | None = None
        """The time at which the training was finished; None before."""
        self._context = context
        self._presence = presence
        self._trainer = trainer
        self._log = log
        self._number = 0
        self._wants = 0  # number of samples to ask for in the next lease; 0: a whole lease
        self.repetition = Repetition(context)
        """The timer for repeating Ready."""
        self._committed: tuple[Sum, Author, Commitment] | None = None

    def make(self, trained: Trained) -> None:
        """Store the finished training as this peer's work for the entry, and choose the number of samples of its next
        lease."""
        self.trained, self.since = trained, self._context.now
        self._number = self._context.new_training_number()
        settings, others = self._context.settings, self._presence.speeds(self._log)
        steps = self._context.pace.steps_beside(self._trainer.speed, others)
        is_whole = steps == settings.inner_steps
        self._wants = 0 if is_whole else steps * settings.samples_per_lease // settings.inner_steps

    def member(self) -> Member:
        """Return this peer's record as a member of the entry, with the values that its Ready states."""
        assert self.trained is not None
        return Member(
            peer=self._context.me,
            tokens=self.trained.tokens,
            samples=self.trained.samples,
            wants=self._wants,
            incarnation=self._context.incarnation,
            format=self.trained.format,
        )

    def commitment(self) -> Commitment | None:
        """Return the signed commitment to the finished training; None if it has no tokens. It is signed only once."""
        if self.trained is None or not self.trained.tokens or self.trained.contribution is None:
            return None
        root, context = self.trained.contribution, self._context
        author = Author(
            peer=context.me, incarnation=context.incarnation, position=self._log.position, number=self._number
        )
        if self._committed is None or self._committed[:2] != (root, author):
            self._committed = root, author, commit_to(root, author, context.keys, self.trained.format)
        return self._committed[2]

    def is_taken_by(self, round: Round) -> bool:
        """Return True if the round's roster has this peer's work as its Ready states it. If this peer is on probation,
        the roster may instead state only the tokens that count."""
        if self.trained is None:
            return False
        mine = [member for member in round.roster if member.peer == self._context.me]
        others = [member for member in round.roster if member.peer != self._context.me]
        stated = self.member()
        return mine in ([stated], [self._log.without_unproven([stated, *others])[0]])

    def is_stated_by(self, begin: Begin) -> bool:
        """Return True if the Begin has this peer's own commitment or norm unchanged, and what this peer needs: all
        commitments to check averages, or all contributions' norms to vote."""
        me, ours, stated = self._context.me, self.commitment(), begin.commitments
        need_all, need_norms = receivers_of_commitments(begin, self._log)
        norms = Norms.of(stated) if stated else begin.norms
        if norms is None or (me in need_all and not stated):
            return me not in need_all and me not in need_norms
        peers = [member.peer for member in begin.round.contributors]
        if len(norms.squares) != len(peers) or norms.digest != begin.round.committed:
            return False
        if stated and [one.format for one in stated] != [member.format for member in begin.round.contributors]:
            return False
        if not stated:
            return dict(zip(peers, norms.squares, strict=True)).get(me) == (ours.squares if ours else None)
        return dict(zip(peers, stated, strict=True)).get(me) == (ours.contribution if ours else None)

    def ready(
        self,
        state_digest: bytes,
        view: int,
        exchange: Exchange | None,
        voter: Voter,
        refused: Ballot | None,
        objection: Objection | None,
    ) -> Ready:
        """Return the Ready for the leader of a view. `objection` is this peer's reason against the proposal of the
        ballot `refused`."""
        presence, member = self._presence, self.member()
        return Ready(
            position=self._log.position,
            view=view,
            incarnation=member.incarnation,
            state_digest=state_digest,
            tokens=member.tokens,
            samples=member.samples,
            wants=member.wants,
            commitment=self.commitment(),
            round=exchange.name if exchange else None,
            terms=exchange.round.terms if exchange else None,
            rate=presence.rate,
            seen=presence.reachability.seen(self._context.me),
            relayed=presence.named(presence.reachability.detours(self._context.now)),
            unreached=presence.named(presence.unreached),
            lock=voter.lock,
            refused=refused,
            reason=objection.refusal.value if objection else "",
            # Name at most MEMBER_LIMIT peers in `named`, because liars can invent peers.
            named=((objection.named if objection else ()) or self._heard_besides(exchange))[:MEMBER_LIMIT],
            lacking=objection.lacking if objection else (),
            unproven=objection.unproven if objection else (),
        )

    def _heard_besides(self, exchange: Exchange | None) -> tuple[str, ...]:
        """Return the voters that this peer hears and that are not in its round (if it is in none: not in the last
        entry). A leader that does not hear these voters would call them gone."""
        if self._log.last is None or not self._log.closes:
            return ()
        expiry = self._context.settings.timing.heartbeat_expiry
        here = self._presence.voters_here(self._log, self._context.incarnation, expiry)
        return tuple(sorted(here.difference(exchange.round.peers if exchange else self._log.roster)))

    @property
    def grace(self) -> float:
        """The seconds for which ready peers wait for others that still train, derived from this peer's last training
        (R7)."""
        return self._context.pace.grace(self._trainer.seconds)

    @property
    def is_under_way(self) -> bool:
        """True if this peer is training for the entry, or has trained for it."""
        return self.trained is not None or self._trainer.state is not TrainerState.IDLE
