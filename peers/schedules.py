"""Random lives of simulated swarms, each drawn from a seed: `python -m peers.schedules --seeds 1000`."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

from peers.history import InvariantError
from peers.settings import RunSettings, Timing
from peers.simulation import Faults, Swarm
from peers.wire import digest_of

TRACE_LINES = 60


def agreed(swarm: Swarm) -> bool:
    """Whether all living peers are at one position and working on the next entry."""
    heads = {simulated.peer.log.position.head for simulated in swarm.living}
    return len(heads) == 1 and swarm.longest > 0


def schedule(seed: int, watch: Callable[[Swarm], None] = lambda swarm: None) -> Swarm:
    """One random life of a swarm: 2 to 7 peers, a bad network, a minority that dies, leaves or is cut off; then peace.

    `watch` gets the swarm before anything happens. Raises: InvariantError, also when peace does not bring progress and
    agreement.
    """
    draw = random.Random(seed)
    names = [f"peer{number}" for number in range(draw.randint(2, 7))]
    timing = Timing(grace=30.0, round_timeout=8.0, partition_grace=400.0)
    settings = RunSettings("simulated", digest_of(b"manifest"), 10, 20, 10, len(names) // 2 + 1, timing)
    faults = Faults(
        loss=draw.choice([0, 0.02, 0.2]),
        duplication=draw.choice([0, 0.1]),
        push_failure=draw.choice([0, 0.1]),
        longest_delay=draw.choice([0.05, 1.5]),
        suspicion=draw.choice([0, 0.01, 0.1]),
    )
    swarm = Swarm(seed, settings, faults)
    watch(swarm)
    for name in names:
        swarm.start(name)
    swarm.run(200.0, until=lambda: swarm.longest >= 1)
    victims = names[: (swarm.history.smallest_roster - 1) // 2]
    for name in victims:
        fault = draw.choice([swarm.kill, swarm.leave, swarm.cut_off])
        fault(name)
        swarm.run(draw.uniform(0.1, 30.0))
    swarm.heal()
    for name in victims:
        if swarm.peers[name] not in swarm.living:
            swarm.start(name)
            swarm.run(draw.uniform(0.1, 20.0))
    swarm.faults = Faults()
    goal = swarm.longest + 3
    if not swarm.run(1000.0, until=lambda: swarm.longest >= goal and agreed(swarm)):
        raise InvariantError(f"no progress: longest {swarm.longest}, wanted {goal}")
    return swarm


def main() -> None:
    """Run seeds one after another; the first that fails is shown with the end of its trace."""
    parser = argparse.ArgumentParser(prog="python -m peers.schedules", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    options = parser.parse_args()
    for seed in range(options.first, options.first + options.seeds):
        swarms: list[Swarm] = []
        try:
            schedule(seed, swarms.append)
        except InvariantError as error:
            trace = "\n".join(" ".join(map(str, line)) for line in swarms[0].trace[-TRACE_LINES:])
            raise SystemExit(f"{trace}\nseed {seed}: {error}") from None
    print(f"{options.seeds} schedules from seed {options.first} on: no invariant was broken")


if __name__ == "__main__":
    main()
