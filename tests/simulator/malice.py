"""Who lies in a simulated life, in which way and when; and what the honest must come to all the same."""

from __future__ import annotations

import random
from dataclasses import dataclass

from peers.protocol.schedule import Schedule
from tests.simulator.fault_lies import FAULT_LIES
from tests.simulator.history import InvariantError
from tests.simulator.leading_lies import LEADERS_LIES
from tests.simulator.liars import Liar, Lie
from tests.simulator.lies import MEMBERS_LIES
from tests.simulator.mixtures import MIXED_LIES
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.simulation import Swarm

KINDS: dict[str, type[Lie]] = MEMBERS_LIES | LEADERS_LIES | MIXED_LIES | FAULT_LIES
ENTRIES = 2
"""How many entries the honest must make in their time, and each of them must count in one."""


@dataclass(frozen=True)
class Deceit:
    """What one liar does, once there are `entries` entries and until `stop` seconds are over."""

    peer: str
    kinds: tuple[str, ...]
    entries: int
    stop: float


def draw_deceits(draw: random.Random, names: list[str], kinds: tuple[str, ...]) -> tuple[Deceit, ...]:
    """Draw at least one liar, and less than half of all, alone or as allies that do the same.

    They lie from the founding on only where those who are honest are twice as many: the first roster may be that of any
    who are enough.
    """
    liars = draw.sample(names, draw.randint(1, max(1, (len(names) - 1) // 2)))
    at_once = 3 * len(liars) < len(names)
    ours = tuple(draw.sample(kinds, min(len(kinds), draw.choice((1, 1, 2)))))
    deceits = []
    for liar in sorted(liars):
        chosen = ours if draw.random() < 0.7 else (draw.choice(kinds),)
        is_founder = at_once and draw.random() < 0.5
        first = 0 if is_founder else draw.randint(1, 3)
        deceits.append(Deceit(liar, chosen, first, draw.choice((float("inf"), draw.uniform(60.0, 600.0)))))
    return tuple(deceits)


def plant(swarm: Swarm, deceits: tuple[Deceit, ...]) -> None:
    """Have these peers lie, from their start on."""
    by_name, make = {deceit.peer: deceit for deceit in deceits}, swarm.peer_of

    def peer_of(name: str, swarm: Swarm, clock: tuple[float, float]) -> SimulatedPeer:
        deceit = by_name.get(name)
        if deceit is None:
            return make(name, swarm, clock)
        lies, draw = [KINDS[kind] for kind in deceit.kinds], random.Random(f"{swarm.seed} {name}")

        def is_time() -> bool:
            return swarm.longest >= deceit.entries and swarm.now < deceit.stop

        return Liar(name, swarm, clock, lies, draw, tuple(by_name), is_time)

    swarm.peer_of = peer_of
    swarm.history.liars = frozenset(by_name)


def thrive(swarm: Swarm, deceits: tuple[Deceit, ...], training: float) -> None:
    """Wait until the honest have made entries, agree and have all counted, while the liars go on.

    Raises: InvariantError.
    """
    liars = {deceit.peer for deceit in deceits}
    goal, counted = swarm.longest + ENTRIES, swarm.history.counted.copy()

    def excluded() -> list[str]:
        return [one.name for one in swarm.honest if swarm.history.counted[one.name] == counted[one.name]]

    def do_agree() -> bool:
        return len({one.peer.log.position.head for one in swarm.honest}) == 1

    limit = ENTRIES * Schedule(swarm.settings.timing).progress(training, len(liars))
    if swarm.run(limit, until=lambda: swarm.longest >= goal and not excluded() and do_agree()):
        return
    if swarm.longest < goal:
        raise InvariantError(f"no progress in {limit:.0f} s: longest {swarm.longest}, wanted {goal}")
    if excluded():
        raise InvariantError(f"excluded for {limit:.0f} s, though honest: {', '.join(excluded())}")
    heads = {one.name: str(one.peer.log.position) for one in swarm.honest}
    raise InvariantError(f"the honest do not agree within {limit:.0f} s: {heads}")
