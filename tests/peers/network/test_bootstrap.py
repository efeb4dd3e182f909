"""What a bootstrap node does with each of its runs, and whom it lets announce more."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peers import metrics
from peers.metrics import Health
from peers.network import bootstrap, run_failures
from peers.network.bootstrap import ANNOUNCEMENTS_BURST, _BootstrapNode
from peers.network.channel import RefusalError
from peers.network.known_runs import Admissions
from peers.network.manifest_store import REVOKED_SUFFIX, ManifestStore
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest
from peers.values.wire import pack
from tests.peers.network.test_admissions import BY_INVITATION, LIST

ORGANISER = Identity.generate()
FIRST, SECOND = (SignedManifest.create(ORGANISER, name, {}) for name in ("first", "second"))


def test_a_node_that_publishes_a_thousand_runs_is_well_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was called ill before it came to the end of them."""
    seconds, ill = 0.0, list[str]()
    health = Health(lambda: seconds)
    monkeypatch.setattr(bootstrap, "HEALTH", health)

    class Transport:
        async def store_manifest(self, manifest: SignedManifest, lifetime: float) -> None:
            nonlocal seconds
            seconds += 2.0
            ill.extend(health.reasons)

        async def heartbeats(self, run_id: str) -> list[Heartbeat]:
            return []

    store: Any = [FIRST] * 1000
    transport: Any = Transport()
    asyncio.run(_BootstrapNode(transport, store, {}).publish())
    assert ill == []
    seconds += 4 * bootstrap.REPUBLISH_INTERVAL
    assert health.reasons, "and what has stopped is told"


class Store(list[SignedManifest]):
    """Manifests, and which of their runs were seen in use."""

    def __init__(self, *manifests: SignedManifest) -> None:
        super().__init__(manifests)
        self.touched: list[str] = []

    def knows(self, run_id: str) -> bool:
        return True

    def touch(self, run_id: str) -> None:
        self.touched.append(run_id)


def test_a_run_that_cannot_be_published_keeps_no_other_from_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named once, and tried again later and later."""
    seconds, tried = 0.0, list[str]()

    class Transport:
        async def store_manifest(self, manifest: SignedManifest, lifetime: float) -> None:
            tried.append(manifest.name)
            if manifest is FIRST:
                raise ZeroDivisionError("of its making")

        async def heartbeats(self, run_id: str) -> list[Heartbeat]:
            return []

    store: Any = Store(FIRST, SECOND)
    transport: Any = Transport()
    node = _BootstrapNode(transport, store, {})
    monkeypatch.setattr(run_failures, "now", lambda: seconds)
    for pause in (0.0, 4.0, 1.0, 9.0, 1.0):
        seconds += pause
        asyncio.run(node.publish())
    assert tried.count("second") == 5
    assert tried.count("first") == 3, "after no, 5 and 15 seconds"
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"run {FIRST.run_id}: publishing failed" in record.getMessage()


@pytest.mark.parametrize(
    ("states", "is_used"),
    [
        ([], False),
        ([PeerState.ARCHIVING], False),
        ([PeerState.LEAVING], False),
        ([PeerState.ARCHIVING, PeerState.TRAINING], True),
    ],
)
def test_only_peers_that_are_there_keep_a_run_from_being_forgotten(states: list[PeerState], is_used: bool) -> None:
    """The node's own archive has heartbeats in each run by invitation."""

    class Transport:
        async def store_manifest(self, manifest: SignedManifest, lifetime: float) -> None:
            pass

        async def heartbeats(self, run_id: str) -> list[Heartbeat]:
            return [Heartbeat.model_construct(state=state) for state in states]

    store: Any = Store(FIRST)
    transport: Any = Transport()
    asyncio.run(_BootstrapNode(transport, store, {}).publish())
    assert store.touched == ([FIRST.run_id] if is_used else [])


def test_one_network_announces_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever keys it makes up; another network is not kept waiting, and after a while it may go on."""
    seconds, lookups = 1000.0, list[str]()
    monkeypatch.setattr(bootstrap, "now", lambda: seconds)

    class Daemon:
        async def network_of(self, peer: str) -> str:
            lookups.append(peer)
            return peer.partition("-")[0]

    transport: Any = SimpleNamespace(daemon=Daemon())
    node = _BootstrapNode(transport, Store(FIRST), {})  # type: ignore[arg-type]

    async def announce(peer: str) -> str:
        assert await node.on_announcement(peer, FIRST.pack()) == FIRST.run_id.encode()
        return lookups[-1].partition("-")[0]

    async def refusal(peer: str) -> str:
        try:
            await announce(peer)
        except RefusalError as error:
            return str(error)
        return ""

    async def scenario() -> None:
        nonlocal seconds
        for number in range(int(ANNOUNCEMENTS_BURST)):
            assert await announce(f"here-{number}") == "here"
        with pytest.raises(RefusalError, match="your network, here, has announced many runs lately; try again in 10 s"):
            await announce("here-one-more")
        assert await announce("there-0") == "there"
        seconds += 11.0
        assert await announce("here-later") == "here"
        for _ in range(int(ANNOUNCEMENTS_BURST) + 1):
            seconds += 10.0
            await announce("there-0")
        refusals = [await refusal("there-0") for _ in range(100)]
        assert "you have announced many runs lately; try again in 10 seconds" in refusals[-1]
        asked = len(lookups)
        await refusal("there-0")
        assert len(lookups) == asked, "a peer that goes on is refused before anything is done"

    asyncio.run(scenario())


def test_a_restarted_node_knows_which_tickets_were_revoked(tmp_path: Path) -> None:
    store = ManifestStore(tmp_path)
    store.add(BY_INVITATION, "here")
    store.keep(REVOKED_SUFFIX, BY_INVITATION.run_id, pack(LIST))
    runs = SimpleNamespace(admissions=Admissions(), take_heads=None)
    transport: Any = SimpleNamespace(runs=runs, learn=lambda manifest: runs.admissions.learn(manifest))
    _BootstrapNode(transport, ManifestStore(tmp_path), {})._learn(BY_INVITATION)
    admission = runs.admissions.of(BY_INVITATION.run_id)
    assert admission is not None
    assert admission.number == LIST.number


def test_an_announced_run_has_its_metric_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the series of a new run's live peers began minutes later."""
    monkeypatch.setattr(bootstrap, "now", lambda: 0.0)

    class Transport:
        daemon = SimpleNamespace()
        runs = SimpleNamespace(admissions=Admissions())

        def learn(self, manifest: SignedManifest) -> None:
            pass

        async def store_manifest(self, manifest: SignedManifest, lifetime: float) -> None:
            pass

        async def heartbeats(self, run_id: str) -> list[Heartbeat]:
            return [Heartbeat.model_construct(state=PeerState.TRAINING)]

    async def network_of(peer: str) -> str:
        return "here"

    transport: Any = Transport()
    transport.daemon.network_of = network_of
    node = _BootstrapNode(transport, ManifestStore(tmp_path), {})
    asyncio.run(node.on_announcement("a", FIRST.pack()))
    assert metrics.RUN_LIVE_PEERS.labels(FIRST.run_id)._value.get() == 1
