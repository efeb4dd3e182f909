"""Who lies in a simulated life, in which way and when; and what the honest must come to all the same."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from peers.log.settings import Timing
from peers.log.state import TERM, Quorum
from peers.protocol.pacemaker import MARGIN, death
from tests.simulator import claims, lies, mixtures
from tests.simulator.history import InvariantError
from tests.simulator.liars import Liar, Lie
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.simulation import Swarm

VOTERS: Mapping[str, type[Lie]] = {
    "silent voter": lies.SilentVoter,
    "double voter": lies.DoubleVoter,
    "lock breaker": lies.LockBreaker,
    "ballot burner": lies.BallotBurner,
    "false farewell": lies.FalseFarewell,
    "invented lock": lies.InventedLock,
    "unasked certificates": lies.UnaskedCertificates,
}
LEADERS: Mapping[str, type[Lie]] = {
    "mute leader": lies.MuteLeader,
    "never proposes": lies.NeverProposes,
    "slow leader": lies.SlowLeader,
    "begins again": lies.BeginsAgain,
    "tells some": lies.TellsSome,
    "leaves out": lies.LeavesOut,
    "keeps few": lies.KeepsFew,
    "many begins": lies.ManyBegins,
    "invented roots": lies.InventedRoots,
    "two proposals": lies.TwoProposals,
    "names the honest": claims.NamesHonest,
    "refuses all": claims.RefusesAll,
    "keeps newcomers out": claims.KeepsNewcomersOut,
    "gives no lease": claims.GivesNoLease,
    "one lease for all": claims.OneLeaseForAll,
    "other leases": claims.OtherLeases,
}
REDUCERS: Mapping[str, type[Lie]] = {
    "mute": lies.Mute,
    "starves": lies.Starves,
    "makes absent": lies.MakesAbsent,
    "many averages": lies.ManyAverages,
    "wrong averages": lies.WrongAverages,
    "wrong blocks": lies.WrongBlocks,
    "unsigned blocks": lies.UnsignedBlocks,
    "many commitments": lies.ManyCommitments,
    "trickles": claims.Trickles,
}
CLAIMS: Mapping[str, type[Lie]] = {
    "invented log": claims.InventedLog,
    "claims in turn": claims.ClaimsInTurn,
    "leaps ahead": claims.LeapsAhead,
    "seems ready": claims.SeemsReady,
    "whispers": claims.Whispers,
    "false state": claims.FalseState,
    "false snapshot": claims.FalseSnapshot,
    "false rate": claims.FalseRate,
    "false speed": claims.FalseSpeed,
    "reaches nobody": claims.ReachesNobody,
    "jumps views": claims.JumpsViews,
    "many readys": claims.ManyReadys,
    "forged proofs": claims.ForgedProofs,
    "many proofs": claims.ManyProofs,
    "old proofs": claims.OldProofs,
    "replays": mixtures.Replays,
    "mixtures": mixtures.Mixtures,
}
KINDS: dict[str, type[Lie]] = {**VOTERS, **LEADERS, **REDUCERS, **CLAIMS}
SIGNED: Mapping[str, str] = {
    "double voter": "votes",
    "false farewell": "votes",
    "many averages": "averages",
    "many commitments": "commitments",
    "many proofs": "commitments",
}
"""Lies that convict their liar wherever they are told, and the kind of their proof."""
FORKS = frozenset({"two proposals"})
"""Lies that fork a run by majority, where their author is in both quorums. They convict it, and all end on a branch."""
ENTRIES = 2
"""Entries that the honest must make in their time; each of them must count in one."""


@dataclass(frozen=True)
class Deceit:
    """What one liar does, once there are `entries` entries and until `stop` seconds are over."""

    peer: str
    kind: str
    entries: int = 1
    stop: float = float("inf")


def draw_deceits(draw: random.Random, names: list[str], kinds: tuple[str, ...]) -> tuple[Deceit, ...]:
    """Draw at least one liar, and less than half of all, alone or as allies that do the same.

    They lie from the founding on only where those who are honest are twice as many: the first roster may be that of any
    who are enough.
    """
    liars = draw.sample(names, draw.randint(1, max(1, (len(names) - 1) // 2)))
    at_once, ours = 3 * len(liars) < len(names), draw.choice(kinds)
    deceits = []
    for liar in sorted(liars):
        kind = ours if draw.random() < 0.7 else draw.choice(kinds)
        is_founder = at_once and draw.random() < 0.5
        first = 0 if is_founder else draw.randint(1, 3)
        deceits.append(Deceit(liar, kind, first, draw.choice((float("inf"), draw.uniform(60.0, 600.0)))))
    return tuple(deceits)


def plant(swarm: Swarm, deceits: tuple[Deceit, ...]) -> None:
    """Have these peers lie, from their start on."""
    by_name, make = {deceit.peer: deceit for deceit in deceits}, swarm.peer_of

    def peer_of(name: str, swarm: Swarm, clock: tuple[float, float]) -> SimulatedPeer:
        deceit = by_name.get(name)
        if deceit is None:
            return make(name, swarm, clock)
        draw = random.Random(f"{swarm.seed} {name}")

        def is_time() -> bool:
            return swarm.longest >= deceit.entries and swarm.now < deceit.stop

        return Liar(name, swarm, clock, KINDS[deceit.kind], draw, tuple(by_name), is_time)

    swarm.peer_of = peer_of
    swarm.history.liars = frozenset(by_name)
    swarm.history.may_fork = swarm.settings.quorum is Quorum.MAJORITY and any(one.kind in FORKS for one in deceits)


def promised(timing: Timing, training: float, liars: int) -> float:
    """Return the seconds within which an honest majority makes an entry, whatever so many liars do: each leads one view
    at most, which may begin at its end, and then has thrice the time of an exchange."""
    begins = timing.grace + timing.round_timeout
    return training + timing.grace + (liars + 1) * (2 * begins + MARGIN * timing.round_timeout) + 2 * death(timing)


def thrive(swarm: Swarm, deceits: tuple[Deceit, ...], training: float) -> None:
    """Wait until the honest have made entries, agree and have all counted, while the liars go on. A leader may leave a
    member out for its term.

    Raises: InvariantError.
    """
    liars = {deceit.peer for deceit in deceits}
    goal, counted = swarm.longest + ENTRIES, swarm.history.counted.copy()

    def excluded() -> list[str]:
        return [one.name for one in swarm.honest if swarm.history.counted[one.name] == counted[one.name]]

    def do_agree() -> bool:
        return len({one.peer.log.position.head for one in swarm.honest}) == 1

    timing = swarm.settings.timing
    limit = ENTRIES * promised(timing, training, len(liars))
    if not swarm.run(limit, until=lambda: swarm.longest >= goal):
        raise InvariantError(f"no progress in {limit:.0f} s: longest {swarm.longest}, wanted {goal}")
    limit += TERM * (training + timing.grace)

    def has_healed() -> bool:
        return not swarm.history.forks or bool(swarm.history.named)

    if swarm.run(limit, until=lambda: not excluded() and do_agree() and has_healed()):
        return
    if not has_healed():
        raise InvariantError(f"the author of a fork at index {swarm.history.forks[0]} is not excluded")
    if excluded():
        raise InvariantError(f"excluded for {limit:.0f} s, though honest: {', '.join(excluded())}")
    heads = {one.name: str(one.peer.log.position) for one in swarm.honest}
    raise InvariantError(f"the honest do not agree within {limit:.0f} s: {heads}")
