"""The bootstrap node over real libp2p daemons: it remembers, also across restarts, and never loads torch."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from peers.errors import LocalNetworkError
from peers.network import bootstrap, manifest_store
from peers.network.bootstrap import ANNOUNCE_MANIFEST, ANNOUNCEMENTS_BURST, announce_manifest, run_bootstrap
from peers.network.channel import PeerRefusedError
from peers.network.manifest_store import ManifestStore
from peers.network.transport import HivemindTransport
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest

pytestmark = pytest.mark.swarm

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
TIMEOUT = 120.0  # seconds for a node to start, answer or stop; about one on an idle machine
KEPT = ("manifest", "origin")
MANIFEST = SignedManifest.create(Identity.generate(), "tiny", {"name": "tiny"})


@asynccontextmanager
async def bootstrap_node(
    identity: Identity, directory: Path, listen: tuple[str, ...] = LOOPBACK, others: tuple[str, ...] = ()
) -> AsyncIterator[tuple[str, ...]]:
    """A running bootstrap node's addresses."""
    stop, is_ready = asyncio.Event(), asyncio.Event()
    addresses: tuple[str, ...] = ()

    def on_ready(visible: tuple[str, ...]) -> None:
        nonlocal addresses
        addresses = visible
        is_ready.set()

    running = asyncio.create_task(run_bootstrap(identity, listen, (), others, directory, on_ready, stop))
    started = asyncio.create_task(is_ready.wait())
    await asyncio.wait({running, started}, timeout=TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    if running.done():
        await running  # raises
    try:
        yield addresses
    finally:
        stop.set()
        await asyncio.wait_for(running, TIMEOUT)


@asynccontextmanager
async def visitor(addresses: tuple[str, ...], listen: tuple[str, ...] = LOOPBACK) -> AsyncIterator[HivemindTransport]:
    transport = await HivemindTransport.create(Identity.generate(), addresses, listen)
    try:
        yield transport
    finally:
        await transport.close()


def test_announced_run_is_found_after_everybody_has_left_and_the_node_restarted(tmp_path: Path) -> None:
    async def main() -> None:
        identity = Identity.generate()
        async with bootstrap_node(identity, tmp_path) as addresses:
            async with visitor(addresses) as organiser:
                assert await announce_manifest(organiser, MANIFEST, addresses) == addresses
            async with visitor(addresses) as volunteer:
                assert await volunteer.find_manifest(MANIFEST.run_id) is not None
        assert {path.name for path in tmp_path.iterdir()} == {f"{MANIFEST.run_id}.{kind}" for kind in KEPT}
        same_port = (addresses[0].partition("/p2p/")[0],)
        async with bootstrap_node(identity, tmp_path, same_port) as again, visitor(again) as volunteer:
            assert again == addresses
            found = await volunteer.find_manifest(MANIFEST.run_id)
            assert found is not None
            assert found.pack() == MANIFEST.pack()

    asyncio.run(main())


@pytest.mark.thorough
def test_manifests_are_published_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "REPUBLISH_INTERVAL", 0.05)

    async def main() -> None:
        async with bootstrap_node(Identity.generate(), tmp_path) as addresses, visitor(addresses) as volunteer:
            (tmp_path / f"{MANIFEST.run_id}.manifest").write_bytes(MANIFEST.pack())
            async with asyncio.timeout(TIMEOUT):
                while await volunteer.find_manifest(MANIFEST.run_id) is None:
                    await asyncio.sleep(0.05)

    asyncio.run(main())


@pytest.mark.thorough
def test_nonsense_is_not_remembered(tmp_path: Path) -> None:
    async def main() -> None:
        forged = MANIFEST.model_copy(update={"content": b"{}"}).pack()
        async with bootstrap_node(Identity.generate(), tmp_path) as addresses, visitor(addresses) as attacker:
            node = addresses[0].rpartition("/")[2]
            for payload in (b"", b"garbage", forged):
                with pytest.raises(PeerRefusedError, match="manifest"):
                    await attacker.call(node, ANNOUNCE_MANIFEST, payload, TIMEOUT)
        assert list(tmp_path.iterdir()) == []

    asyncio.run(main())


@pytest.mark.thorough
def test_full_node_refuses_further_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_store, "MANIFEST_LIMIT", 1)
    store = ManifestStore(tmp_path)
    store.add(MANIFEST, "192.0.2.0/24")
    store.touch(MANIFEST.run_id)

    async def main() -> None:
        other = SignedManifest.create(Identity.generate(), "other", {})
        async with bootstrap_node(Identity.generate(), tmp_path) as addresses, visitor(addresses) as organiser:
            assert await announce_manifest(organiser, MANIFEST, addresses) == addresses
            assert await announce_manifest(organiser, MANIFEST, addresses) == addresses
            assert await announce_manifest(organiser, other, addresses) == ()

    asyncio.run(main())


def test_a_flood_from_one_network_does_not_close_the_node_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: 500 junk manifests in 23 seconds did, whoever signed them. Here they come from 127.0.5.0/24."""
    monkeypatch.setattr(manifest_store, "SHARE_LIMIT", 5)
    monkeypatch.setattr(manifest_store, "MANIFEST_LIMIT", 7)
    monkeypatch.setattr(bootstrap, "now", lambda: 1000.0)  # so that no time passes in which more are let in
    elsewhere = ("/ip4/127.0.5.1/tcp/0",)

    async def flood(attacker: HivemindTransport, node: str, count: int) -> list[str]:
        """What the node answers to so many runs, each of a key of its own."""
        answers = []
        for number in range(count):
            junk = SignedManifest.create(Identity.generate(), f"junk-{number}", {})
            try:
                await attacker.call(node, ANNOUNCE_MANIFEST, junk.pack(), TIMEOUT)
                answers.append("")
            except PeerRefusedError as error:
                answers.append(str(error))
        return answers

    async def main() -> None:
        last = SignedManifest.create(Identity.generate(), "last", {})
        async with bootstrap_node(Identity.generate(), tmp_path) as addresses:
            node = addresses[0].rpartition("/")[2]
            async with visitor(addresses) as organiser, visitor(addresses, elsewhere) as attacker:
                assert await announce_manifest(organiser, MANIFEST, addresses) == addresses
                answers = await flood(attacker, node, 40)
                assert answers.count("") == ANNOUNCEMENTS_BURST
                assert "you have announced many runs lately" in answers[-1]
                assert await announce_manifest(organiser, last, addresses) == addresses
            async with visitor(addresses, elsewhere) as same_attacker:
                [answer] = await flood(same_attacker, node, 1)
                assert "your network, 127.0.5.0/24, has announced many runs lately" in answer
        kept = {path.name.partition("-")[0] for path in tmp_path.glob("*.manifest")}
        assert kept == {"tiny", "last", "junk"}
        assert len(list(tmp_path.glob("junk-*.manifest"))) == 5

    asyncio.run(main())


@pytest.mark.thorough
def test_disk_trouble_is_said_on_both_sides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the node showed a traceback, and the organiser was told of an internal error."""
    directory = tmp_path / "manifests"

    async def main() -> None:
        async with bootstrap_node(Identity.generate(), directory) as addresses, visitor(addresses) as organiser:
            directory.rmdir()
            node = addresses[0].rpartition("/")[2]
            with pytest.raises(PeerRefusedError, match="disk takes no manifest"):
                await organiser.call(node, ANNOUNCE_MANIFEST, MANIFEST.pack(), TIMEOUT)

    asyncio.run(main())
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert str(directory) in record.getMessage()
    assert record.exc_info is None


@pytest.mark.thorough
def test_a_slash_at_the_end_of_an_address_is_no_matter(tmp_path: Path) -> None:
    """Regression: the peer id of such an address was taken to be empty."""

    async def main() -> None:
        async with bootstrap_node(Identity.generate(), tmp_path) as (address, *_):
            slashed = (f"{address}/",)
            async with visitor(slashed) as organiser:
                assert await announce_manifest(organiser, MANIFEST, slashed) == slashed

    asyncio.run(main())


@pytest.mark.thorough
def test_spoiled_files_are_skipped(tmp_path: Path) -> None:
    (tmp_path / f"{MANIFEST.run_id}.manifest").write_bytes(MANIFEST.pack()[:-1])
    (tmp_path / "unrelated.txt").write_text("hello")

    async def main() -> None:
        async with bootstrap_node(Identity.generate(), tmp_path) as addresses, visitor(addresses) as organiser:
            assert await organiser.find_manifest(MANIFEST.run_id) is None
            assert await announce_manifest(organiser, MANIFEST, addresses) == addresses

    asyncio.run(main())
    assert (tmp_path / f"{MANIFEST.run_id}.manifest").read_bytes() == MANIFEST.pack()


@pytest.mark.thorough
def test_unusable_directory_is_named(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")

    async def main() -> None:
        async with bootstrap_node(Identity.generate(), occupied):
            pass

    with pytest.raises(LocalNetworkError, match=str(occupied)):
        asyncio.run(main())


WITHOUT_TORCH = """
import asyncio, sys, tempfile
from pathlib import Path
from peers.network.bootstrap import run_bootstrap
from peers.values.identity import Identity

async def main():
    stop = asyncio.Event()
    with tempfile.TemporaryDirectory() as directory:
        listen = ("/ip4/127.0.0.1/tcp/0",)
        await run_bootstrap(Identity.generate(), listen, (), (), Path(directory), lambda _: stop.set(), stop)

asyncio.run(main())
assert "torch" not in sys.modules
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def test_nodes_that_name_each_other_start_in_any_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the first one ended, since the other one did not answer yet."""
    caplog.set_level(logging.INFO, bootstrap.__name__)
    first, second = Identity.generate(), Identity.generate()
    with socket.socket() as one, socket.socket() as other:
        for unused in (one, other):
            unused.bind(("127.0.0.1", 0))
        places = [f"/ip4/127.0.0.1/tcp/{unused.getsockname()[1]}" for unused in (one, other)]
    at_first, at_second = f"{places[0]}/p2p/{first.peer_id}", f"{places[1]}/p2p/{second.peer_id}"

    async def main() -> None:
        async with (
            bootstrap_node(first, tmp_path / "first", (places[0],), (at_second,)),
            bootstrap_node(second, tmp_path / "second", (places[1],), (at_first,)),
            visitor((at_second,)) as organiser,
            visitor((at_first,)) as volunteer,
        ):
            await announce_manifest(organiser, MANIFEST, (at_second,))
            async with asyncio.timeout(TIMEOUT):
                while await volunteer.find_manifest(MANIFEST.run_id) is None:
                    await asyncio.sleep(0.05)

    asyncio.run(main())
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "no bootstrap node answered" in record.getMessage()
    assert sum("asked this node to stop" in record.getMessage() for record in caplog.records) == 2


def test_node_needs_no_torch() -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    peak_kilobytes = int(done.stdout)
    assert peak_kilobytes < 120_000  # 60,000 when written
