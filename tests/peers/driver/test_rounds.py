"""What rounds cost, as the driver counts it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from peers.driver import rounds
from peers.driver.rounds import RoundCosts, Rounds
from peers.network.throttle import LinkTime
from peers.network.transport import HivemindTransport
from peers.transfer.buffers import PayloadBuffers
from tests.peers.fakes import FakeWorkload
from tests.peers.rounds import round_name


class StandIn:
    """Traffic that moves nothing."""

    def __init__(self) -> None:
        self.uplink, self.received_bytes = SimpleNamespace(sent_bytes=0), 0
        self.peaks = 0.0, 0.0

    def begin(self, round_name: object, others: int) -> None:
        self.uplink.sent_bytes += 10

    def tidy(self, present: object) -> None:
        self.received_bytes += 1


def test_seconds_count_while_a_round_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another round at the same entry goes on counting, and nothing is counted twice."""
    clock = [100.0]
    monkeypatch.setattr(rounds, "now", lambda: clock[0])
    peer = SimpleNamespace(rounds={}, is_exchanging=False, me="a", settings=SimpleNamespace(run="run"))
    host: Any = SimpleNamespace(peer=peer)
    transport: Any = SimpleNamespace(no_round=LinkTime(), caps=None)
    workload: Any = FakeWorkload()
    monkeypatch.setattr(rounds, "Traffic", lambda *parts: StandIn())
    counted = Rounds(cast(HivemindTransport, transport), workload, [PayloadBuffers(workload)], host)
    assert counted.costs == RoundCosts(0.0, 0, 0)
    seconds, taken = "diloco_peer_round_seconds_total", "diloco_peer_rounds_total"
    before = {name: REGISTRY.get_sample_value(name) or 0.0 for name in (seconds, taken)}

    def begin(name: str) -> None:
        round = SimpleNamespace(name=round_name(leader=name), peers=("a", "b"))
        opening: Any = SimpleNamespace(round=round)
        monkeypatch.setattr(counted._buffers[0], "open", lambda name: None)
        counted.open(opening)
        peer.rounds[0] = SimpleNamespace(exchange=SimpleNamespace(name=round.name))
        counted.follow()

    begin("first")
    clock[0] += 3
    assert counted.costs.seconds == 3
    begin("second")
    clock[0] += 4
    peer.rounds.clear()
    counted.follow()
    clock[0] += 50
    counted.follow()
    assert counted.costs == RoundCosts(7.0, 20, 3)
    assert {name: (REGISTRY.get_sample_value(name) or 0.0) - before[name] for name in before} == {seconds: 7, taken: 2}
    begin("third")
    clock[0] += 1
    assert counted.costs.seconds == 8
