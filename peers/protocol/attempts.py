"""What follows from a running attempt, and from what its members say. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from peers.log.header import NO_PAYLOAD, Fault
from peers.presence.election import culprits
from peers.presence.standing import Pairs
from peers.protocol.effects import Effect, Send
from peers.protocol.messages import Abort, Adopt, Begin, Prove, Ready
from peers.protocol.rounds import Attempt, Round
from peers.values.wire import printable


def reducers(round: Round) -> set[str]:
    """Return those who remain and reduce a part."""
    return {share.member.peer for share in round.shares if share.chunks} & set(round.remaining)


def annex_of(running: Begin | Adopt) -> tuple[Fault, ...]:
    """Return the annex of the entry that an attempt leads to."""
    return running.round.faults if isinstance(running, Begin) else running.header.faults


def told(
    running: Begin | Adopt, members: Sequence[str], ready: Mapping[str, Ready], proofs: Mapping[str, Sequence[Prove]]
) -> list[Effect]:
    """Tell these members of an attempt, first what each is to see of what proves its annex, and only those who need it
    what else is long.

    Who reduces needs what others have committed to; who does not hold an entry that is handed on, as it was `ready`,
    the signatures of those who do.
    """
    if isinstance(running, Adopt):
        lacking = {peer for peer in members if peer not in ready or not _holds(ready[peer], running)}
    else:
        lacking = reducers(running.round)
    others = [peer for peer in members if peer not in lacking]
    left_out = "holders" if isinstance(running, Adopt) else "commitments"
    short = running.model_copy(update={left_out: ()}) if others else running
    whole = [Send(peer, message) for peer in members if peer in lacking for message in (*proofs.get(peer, ()), running)]
    return [*whole, *(Send(peer, message) for peer in others for message in (*proofs.get(peer, ()), short))]


def ends(attempt: Attempt, members: Iterable[str], reason: str) -> list[Effect]:
    """Tell these that an attempt is over."""
    abort = Abort(attempt=attempt, reason=printable(reason))
    return [Send(peer, abort) for peer in members]


def _holds(ready: Ready, adopt: Adopt) -> bool:
    return ready.held is not None and ready.held.header == adopt.header


def still_in_round(me: str, ready: Mapping[str, Ready]) -> Round | None:
    """Return the round that we are in the midst of, without those who are not, or are lost to one of us."""
    rounds = {peer: one.round for peer, one in ready.items() if one.round}
    mine = rounds.get(me)
    if mine is None:
        return None
    others = {peer: round for peer, round in rounds.items() if round.is_same(mine)}
    lost = {peer for round in others.values() for peer in round.lost}
    return mine.without(lost.union(peer for peer in mine.peers if peer not in others))


def is_connected(round: Round, pairs: Pairs) -> bool:
    """Whether all who remain can exchange data with all of them who reduce, as far as is known."""
    return not any(pairs.broken_with(peer) for peer in reducers(round))


def held_up_by(
    running: Begin | Adopt,
    members: Collection[str],
    complete: Collection[str],
    waiting: Mapping[str, tuple[str, ...]],
) -> tuple[str, ...]:
    """Return who holds the attempt up: of an entry that nobody could fetch, those who say that they hold it.

    To do without them is safe. Had it been committed, there would be no majority without one that holds it.
    """
    is_fetched = isinstance(running, Adopt) and running.header.payload != NO_PAYLOAD
    if isinstance(running, Adopt) and is_fetched and set(complete) <= set(running.donors):
        return tuple(peer for peer in running.donors if peer in members)
    found = culprits(members, complete, waiting)
    owing = _owe_blocks(running.round, waiting) if isinstance(running, Begin) else ()
    return owing if owing and set(owing) <= set(found) else found


def are_apart(slow: Sequence[str], waiting: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether two members hold the attempt up, each of which waits for the other alone: it seems that nothing
    comes from one to the other, and nobody else can tell who of them is to blame."""
    return len(slow) == 2 and all(waiting.get(one) == (other,) for one, other in (slow, slow[::-1]))


def _owe_blocks(round: Round, waiting: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the members that average nothing and that most reducers wait for, two at least: what these lack is blocks,
    for which nobody need wait."""
    able = reducers(round)
    named = Counter(peer for reducer in able for peer in waiting.get(reducer, ()) if peer not in able)
    return tuple(sorted(peer for peer, count in named.items() if count >= 2 and 2 * count > len(able)))
