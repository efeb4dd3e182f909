"""A peer keeps its run findable: it repeats the manifest and remembers others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import cast

import pytest

from peers.network import bootstrap
from peers.network.bootstrap import keep_announced
from peers.network.first_contact import RememberedPeers
from peers.network.transport import HivemindTransport
from peers.presence.heartbeat import Heartbeat
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG

OTHER = Identity.generate().peer_id
ADDRESS = f"/ip4/11.77.0.9/tcp/31337/p2p/{OTHER}"
MANIFEST = SignedManifest.create(Identity.generate(), "tiny", {"name": "tiny"})


class Network:
    """Fails the first time."""

    def __init__(self) -> None:
        self.stored: list[SignedManifest] = []
        self.attempts = 0

    async def store_manifest(self, manifest: SignedManifest, ttl: float) -> None:
        self.attempts += 1
        if self.attempts == 1:
            raise ConnectionResetError
        self.stored.append(manifest)


async def until(condition: object, why: str) -> None:
    assert callable(condition)
    try:
        async with asyncio.timeout(240):
            while not condition():
                await asyncio.sleep(0)
    except TimeoutError:
        raise AssertionError(why) from None


def keep(
    network: Network, others: Callable[[], Iterable[Heartbeat]], remembered: RememberedPeers | None = None
) -> Coroutine[None, None, None]:
    return keep_announced(cast(HivemindTransport, network), MANIFEST, others, remembered)


def test_the_manifest_is_repeated_and_peers_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "LOOK_INTERVAL", 0.0)
    monkeypatch.setattr(bootstrap, "REPUBLISH_INTERVAL", 0.0)
    path, network = tmp_path / "peers.json", Network()
    others = [beat(OTHER, LOG).model_copy(update={"addresses": (ADDRESS,)})]

    async def scenario() -> None:
        remembered = RememberedPeers(path, MANIFEST.run_id)
        task = asyncio.create_task(
            keep_announced(cast(HivemindTransport, network), MANIFEST, lambda: others, remembered)
        )
        await until(lambda: len(network.stored) >= 2, "the manifest is not repeated")
        await until(path.exists, "nothing is remembered")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert set(network.stored) == {MANIFEST}
    assert RememberedPeers(path, MANIFEST.run_id).addresses() == (ADDRESS,)


def test_nothing_need_be_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "LOOK_INTERVAL", 0.0)
    network = Network()

    async def scenario() -> None:
        task = asyncio.create_task(keep_announced(cast(HivemindTransport, network), MANIFEST, lambda: ()))
        await until(lambda: network.attempts, "the manifest is not stored")
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    assert network.attempts == 1  # a whole interval lies between two
