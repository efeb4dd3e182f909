"""Swarms of uneven machines whose training takes long: nobody is late for long, and nobody's work is left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from peers.log.settings import RunSettings, Timing
from peers.simulator.simulation import Swarm
from peers.values.wire import digest_of

SETTINGS = RunSettings("simulated", digest_of(b"manifest"), 100, 200, 10, 1, Timing())
STEP_SECONDS = 3.0
SPEEDS = (1.0, 0.95, 0.9, 0.85)


@pytest.mark.parametrize("unevenness", [0.0, 0.03])
def test_peers_that_are_nearly_as_fast_are_in_every_entry(unevenness: float) -> None:
    """Regression: each trained as much as the fastest, came later than the grace, and was in every other entry."""
    settings = replace(SETTINGS, minimum_peers=len(SPEEDS))
    swarm = Swarm(1, settings, speeds=SPEEDS, step_seconds=STEP_SECONDS, unevenness=unevenness, traced=False)
    entries = Counter[str]()

    def see(name: str) -> None:
        header = swarm.peers[name].peer.log.last
        assert header is not None
        entries[name] += header.tokens_of(name) > 0

    swarm.on_apply = see
    for place in range(len(SPEEDS)):
        swarm.start(f"peer{place}")
    assert swarm.run(12_000.0, until=lambda: swarm.longest >= 20)
    assert min(entries.values()) >= 0.9 * swarm.longest, entries


def test_a_peer_that_is_never_ready_does_not_hold_up_each_round() -> None:
    """The others waited for a twentieth of the training, 30 seconds, each time that it asked for work anew."""
    settings, speeds = replace(SETTINGS, minimum_peers=4), (1.0, 1.0, 1.0, 0.001)
    swarm = Swarm(1, settings, speeds=speeds, step_seconds=6.0, unevenness=0.0, traced=False)
    made: list[float] = []
    swarm.on_apply = lambda name: made.append(swarm.now) if name == "peer0" else None
    for place in range(len(speeds)):
        swarm.start(f"peer{place}")
    assert swarm.run(20_000.0, until=lambda: swarm.longest >= 12)
    seconds = [later - earlier for earlier, later in pairwise(made)]
    assert max(seconds[:2]) > 630, "it might still come"
    assert max(seconds[3:]) < 615
