"""Random lives of simulated swarms, each drawn from a seed: `python -m tests.simulator.schedules --seeds 1000`."""

from __future__ import annotations

import argparse
import gc
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import count

from peers.log.settings import RunSettings, Timing
from peers.values.wire import digest_of
from tests.simulator.history import InvariantError
from tests.simulator.links import Faults, Rate
from tests.simulator.malice import KINDS, Deceit, draw_deceits, plant, promised, thrive
from tests.simulator.simulation import Swarm
from tests.simulator.spot_checks import check_averages

TRACE_LINES = 60
HARD = ("lose", "lose", "leave")  # what only a minority may meet: a peer that comes back has forgotten its votes
KILL = ("kill", "kill")  # a peer that comes back has its disk
SOFT = ("cut off", "deafen", "stop")
CALM = Faults()
THIN = Rate(up=20.0, down=20.0)  # a payload, of 56 bytes, takes three seconds
SPEEDS = (1.0, 0.9, 0.4)  # by name: some peers train shorter leases
PEACE = 1000.0  # seconds in which everybody must agree again
TIMINGS = (Timing(grace=30.0, round_timeout=8.0, partition_grace=400.0), Timing())  # the second: as manifests have it
INNER_STEPS = 5
EVENLY = 0.1
"""With liars nobody is late by chance: all the honest must count in their time."""
LONGEST_TRAINING = (1 + EVENLY) * INNER_STEPS / min(SPEEDS)  # seconds
FAST = 10.0
"""Times the usual speed: entries come faster than heartbeats."""
IMPATIENT = Timing(grace=5.0, round_timeout=60.0, partition_grace=20.0)
"""A minority goes on alone before others would give up on a leader."""
BATCH = 25  # seeds that one process takes at once
SELDOM = (50_000, 10, 10)
"""When to look for garbage. A swarm keeps all its entries: to search them as often as usual takes a tenth of a life."""


@dataclass(frozen=True)
class Blow:
    """What befalls a peer at its `effect`-th message or other deed from now on. It is undone after `seconds`."""

    kind: str
    peer: str
    effect: int
    seconds: float


@dataclass(frozen=True)
class Life:
    """One life of a swarm: who is in it, how bad its network is, and what happens to whom."""

    seed: int
    peers: int
    faults: Faults
    blows: tuple[Blow, ...]
    timing: Timing = TIMINGS[0]
    fragments: int = 1
    liars: tuple[Deceit, ...] = ()
    pace: float = 1.0
    """How much faster than usual all train."""
    contributions: float | None = None
    """The share of them whose contributions are enough; None: the run is synchronous."""

    def __str__(self) -> str:
        blows = "".join(f"\n  {what}" for what in (*self.blows, *self.liars))
        what = f"{self.peers} peers, {self.faults}, {self.timing}, {self.fragments} fragments, pace {self.pace:g}"
        policy = "" if self.contributions is None else f", {self.contributions:g} of all contributions are enough"
        return f"seed {self.seed}, {what}{policy}{blows}"


def draw_life(seed: int, fragments: int = 1, kinds: tuple[str, ...] = ()) -> Life:
    """2 to 12 peers, a bad network, and a few blows. With `kinds` of lies some of the peers are liars."""
    draw = random.Random(seed)
    peers = draw.choice((2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 10, 12))
    if kinds:
        return _draw_malice(draw, seed, max(peers, 3), fragments, kinds)
    names = [f"peer{number}" for number in range(peers)]
    timing = draw.choice(TIMINGS)
    slow = draw.choice([(), (), (draw.choice(names),)])
    # A slow link's chunks take 40 times as long: not as long as a manifest's partition grace.
    longest_delay = draw.choice([0.05, 0.3, 0.3 if slow and timing == Timing() else 1.5])
    faults = Faults(
        loss=draw.choice([0, 0.02, 0.2]),
        duplication=draw.choice([0, 0.1]),
        stream_failure=draw.choice([0, 0.02, 0.1]),
        longest_delay=longest_delay,
        suspicion=draw.choice([0, 0.01, 0.1]),
        slow=slow,
        broken=draw.choice([(), (), _some_pairs(draw, names)]),
        relayed=draw.choice([(), (), _some_pairs(draw, names)]),
    )
    mortal = names[: (peers - 1) // 2]
    blows = []
    for _ in range(draw.randint(1, 4)):
        kind = draw.choice((HARD if mortal else ()) + KILL + SOFT)
        victim = draw.choice(mortal if kind in HARD else names)
        blows.append(Blow(kind, victim, draw.randint(1, 150), draw.uniform(0.1, 25.0)))
    faults = replace(faults, one_way=draw.choice([(), (), _some_ways(draw, names)]))
    if not slow:
        faults = replace(faults, rates=draw.choice([(), (), ((draw.choice(names), THIN),)]))
    return Life(seed, peers, faults, tuple(blows), timing, fragments)


def _draw_malice(draw: random.Random, seed: int, peers: int, fragments: int, kinds: tuple[str, ...]) -> Life:
    """Draw a life with liars. Of those whom no blow meets more than half are honest, and of all more than half are
    honest and keep their votes: so they must get on. Liars may vote for nothing."""
    names = [f"peer{number}" for number in range(peers)]
    deceits = draw_deceits(draw, names, kinds)
    honest = [name for name in names if name not in {deceit.peer for deceit in deceits}]
    faults = Faults(
        loss=draw.choice([0, 0, 0.02]),
        duplication=draw.choice([0, 0.1]),
        stream_failure=draw.choice([0, 0, 0.02]),
        longest_delay=draw.choice([0.05, 0.05, 0.3]),
        suspicion=draw.choice([0, 0, 0.01]),
    )
    victims = honest[: peers - 2 * len(deceits) - 1]
    blows, losers, spare = [], set[str](), len(honest) - peers // 2 - 1
    for _ in range(draw.randint(0, 2) if victims else 0):
        kind, victim = draw.choice(HARD + KILL + SOFT), draw.choice(victims)
        if kind == "lose" and len(losers | {victim}) > spare:
            kind = "kill"
        elif kind == "lose":
            losers.add(victim)
        blows.append(Blow(kind, victim, draw.randint(1, 150), draw.uniform(0.1, 25.0)))
    timing = draw.choice((*TIMINGS, IMPATIENT))
    return Life(seed, peers, faults, tuple(blows), timing, fragments, deceits, draw.choice((1.0, 1.0, FAST)))


def _some_pairs(draw: random.Random, names: list[str]) -> tuple[tuple[str, str], ...]:
    """One pair, or all that one peer is in."""
    one, other = draw.sample(names, 2)
    return draw.choice([((one, other),), tuple((one, third) for third in names if third != one)])


def _some_ways(draw: random.Random, names: list[str]) -> tuple[tuple[str, str], ...]:
    """One pair of peers of which the first does not reach the second, and is reached by it."""
    one, other = draw.sample(names, 2)
    return ((one, other),)


def unwatched(swarm: Swarm) -> None:
    """Nobody looks at the swarm while it lives."""


def live(life: Life, watch: Callable[[Swarm], None] = unwatched, traced: bool = False) -> Swarm:
    """Run a life, and then peace. `watch` gets the swarm before anything happens; `traced` is as in a swarm.

    Raises: InvariantError, also when peace does not bring progress and agreement.
    """
    manifest, founders = digest_of(b"manifest"), life.peers - sum(not liar.entries for liar in life.liars)
    settings = RunSettings("simulated", manifest, INNER_STEPS, 10, 10, founders, life.timing, fragments=life.fragments)
    settings = replace(settings, contributions=life.contributions)
    speeds = tuple(life.pace * speed for speed in SPEEDS)
    formats = (0, 0, 1) if life.seed % 3 == 0 else (0,)
    swarm = Swarm(
        life.seed, settings, life.faults, one_child=not life.liars, traced=traced, speeds=speeds, formats=formats
    )
    if life.liars:
        swarm.unevenness = EVENLY
        plant(swarm, life.liars)
    watch(swarm)
    for number in range(life.peers):
        swarm.start(f"peer{number}")
    if life.liars:
        _live_with_liars(swarm, life)
        return swarm
    swarm.run(200.0, until=lambda: swarm.longest >= 1 and swarm.history.smallest_roster == life.peers)
    if swarm.history.smallest_roster == life.peers:  # else a minority of the names may be more of those who count
        for blow in life.blows:
            _strike(swarm, blow)
    swarm.faults = CALM
    swarm.heal()
    goal = swarm.longest + 2
    if not swarm.run(PEACE, until=lambda: swarm.longest >= goal and agreed(swarm)):
        raise InvariantError(f"no progress: longest {swarm.longest}, wanted {goal}")
    return swarm


def _live_with_liars(swarm: Swarm, life: Life) -> None:
    """Strike the honest, and see that in peace they get on, while the liars lie."""
    check_averages(swarm)
    limit = promised(swarm.settings.timing, LONGEST_TRAINING, len(life.liars))
    if not swarm.run(limit, until=lambda: swarm.longest >= 1):
        raise InvariantError(f"no first entry within {limit:.0f} s")
    swarm.run(60.0)
    for blow in life.blows:
        _strike(swarm, blow)
    swarm.faults = CALM
    swarm.heal()
    thrive(swarm, life.liars, LONGEST_TRAINING)


def _strike(swarm: Swarm, blow: Blow) -> None:
    """Wait for the victim's n-th effect, hit it between two of them, and undo it later."""
    strike = {
        "kill": swarm.kill,
        "lose": swarm.kill,
        "cut off": swarm.cut_off,
        "deafen": swarm.deafen,
        "stop": swarm.stop,
    }
    deeds = count(1)
    struck = False

    def on_effect(name: str) -> None:
        nonlocal struck
        if name == blow.peer and not struck and next(deeds) == blow.effect:
            struck = True
            if blow.kind == "leave":
                swarm.at(0.0, lambda: swarm.leave(name))  # it decides between two events, not amid its deeds
            else:
                strike[blow.kind](name)

    swarm.on_effect = on_effect
    swarm.run(40.0, until=lambda: struck)
    swarm.on_effect = lambda name: None
    swarm.run(blow.seconds)
    if blow.kind in SOFT:
        swarm.heal()
    if blow.kind == "lose" and struck:
        swarm.disk_of(blow.peer).lose()
    if swarm.peers[blow.peer] not in swarm.living:
        swarm.start(blow.peer)


def agreed(swarm: Swarm) -> bool:
    """Whether all living peers are at one position and working on the next entry."""
    heads = {peer.peer.log.position.head for peer in swarm.living}
    return len(heads) == 1 and swarm.longest > 0


def failure(life: Life, watch: Callable[[Swarm], None] = unwatched, traced: bool = False) -> tuple[str, Swarm] | None:
    """What went wrong in a life, if anything did."""
    swarms: list[Swarm] = []

    def begin(swarm: Swarm) -> None:
        swarms.append(swarm)
        watch(swarm)

    try:
        live(life, begin, traced)
    except Exception as error:  # whatever it is: a schedule that crashes has found something
        return f"{type(error).__name__}: {error}", swarms[0]
    return None


def smallest(life: Life, watch: Callable[[Swarm], None] = unwatched) -> Life:
    """The life with all left out that its failure does not need."""
    while True:
        for easier in _easier(life):
            if failure(easier, watch):
                life = easier
                break
        else:
            return life


def _easier(life: Life) -> Iterator[Life]:
    for place in range(len(life.blows)):
        yield replace(life, blows=life.blows[:place] + life.blows[place + 1 :])
    for place in range(len(life.liars) if len(life.liars) > 1 else 0):
        yield replace(life, liars=life.liars[:place] + life.liars[place + 1 :])
    for name in (field.name for field in fields(Faults)):
        if getattr(life.faults, name) != getattr(CALM, name):
            yield replace(life, faults=replace(life.faults, **{name: getattr(CALM, name)}))


def report(life: Life, watch: Callable[[Swarm], None] = unwatched) -> str:
    """A failing life at its smallest, with the end of its trace. `watch` is what it failed with."""
    life = smallest(life, watch)
    failed = failure(life, watch, traced=True)
    assert failed is not None
    what, swarm = failed
    trace = "\n".join(" ".join(map(str, line)) for line in swarm.trace[-TRACE_LINES:])
    return f"{trace}\n{what}\n{life}"


def _look_seldom_for_garbage() -> None:
    """And only among what lives have made: what is imported stays."""
    gc.set_threshold(*SELDOM)
    gc.freeze()


def failing_seeds(seeds: range, draw: Callable[[int], Life]) -> list[int]:
    return [seed for seed in seeds if failure(draw(seed))]


def _draw(seed: int, fragments: int, kinds: tuple[str, ...], contributions: float | None) -> Life:
    return replace(draw_life(seed, fragments, kinds), contributions=contributions)


def main() -> None:
    """Run seeds; one that fails is shown at its smallest, with the end of its trace."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.schedules", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--jobs", type=int, default=None, help="processes (default: one per core)")
    parser.add_argument("--fragments", type=int, default=1, help="of the state; plain DiLoCo has one")
    parser.add_argument("--contributions", type=float, help="of all, that are enough: the runs are asynchronous")
    parser.add_argument(
        "--liars",
        nargs="*",
        choices=sorted(KINDS),
        metavar="KIND",
        help=f"some peers lie, in these ways (default: in all): {', '.join(KINDS)}",
    )
    options = parser.parse_args()
    kinds = () if options.liars is None else tuple(options.liars or KINDS)
    draw = partial(_draw, fragments=options.fragments, kinds=kinds, contributions=options.contributions)
    stop = options.first + options.seeds
    batches = [range(first, min(first + BATCH, stop)) for first in range(options.first, stop, BATCH)]
    with ProcessPoolExecutor(options.jobs, initializer=_look_seldom_for_garbage) as pool:
        found = pool.map(partial(failing_seeds, draw=draw), batches)
        failed = [seed for seeds in found for seed in seeds]
    if failed:
        raise SystemExit(f"{report(draw(failed[0]))}\n{len(failed)} of {options.seeds} seeds failed: {failed[:20]}")
    print(f"{options.seeds} schedules from seed {options.first} on: no invariant was broken")


if __name__ == "__main__":
    main()
