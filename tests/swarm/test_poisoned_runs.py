"""Runs that a stranger has made to do harm: a bootstrap node keeps others all the same, also when started again."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.volunteer.volunteer import connected
from peers.network.bootstrap import ANNOUNCE_MANIFEST
from peers.network.channel import PeerRefusedError
from peers.values.identity import Identity
from peers.values.manifest import Invite, SignedManifest
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, Command, Site, announce_run, eventually, volunteers

pytestmark = pytest.mark.swarm

BOOTSTRAP = ("bootstrap", "--identity", "bootstrap.pem", "--archive", "archive", "--data-port", "0")


@pytest.mark.thorough
def test_a_poisoned_run_ends_the_archive_of_no_other(tmp_path: Path) -> None:
    """Regression: one manifest, which `run create` would never have signed, ended the archive of all runs for good."""
    site = Site(tmp_path)
    corpus = write_corpus(tmp_path / "corpus")
    run = site.write_run(str(corpus))
    poison = poisoned(run)
    with archive(site) as (_, address):
        assert "rounds.heartbeat_seconds = 1e-09: too small. Use 0.1 or more" in refusal(poison, address)
        invite = announce_run(run, address)
        with volunteers(site, invite, "one"):
            eventually(lambda: archived(site, invite) >= 2, "the archive does not follow the run")
    spoiled = Invite.parse(announced_while(site, run, address)).run_id
    (tmp_path / "bootstrap.runs" / f"{poison.run_id}.manifest").write_bytes(poison.pack())
    with archive(site, "--listen", address.partition("/p2p/")[0]) as (node, _):
        before = archived(site, invite)
        with volunteers(site, invite, "one"):
            eventually(lambda: archived(site, invite) >= before + 2, "the archive follows the run no more")
        [skipped] = node.said(f"skipped .*{poison.run_id}")
        assert "heartbeat_seconds = 1e-09: too small" in skipped
        assert len(node.said(f"run {spoiled}: opening its archive failed")) == 1
        assert not node.said("a part of this node has failed")
    site.assert_nothing_is_left()


def poisoned(run: Path) -> SignedManifest:
    """A manifest whose archive would have two heartbeats in a millisecond."""
    content = RunConfig.from_toml(run).to_manifest_content()
    content["rounds"]["heartbeat_seconds"] = 1e-9
    content["admission"]["mode"] = "invite"
    return SignedManifest.create(Identity.generate(), "poison", content)


def refusal(manifest: SignedManifest, address: str) -> str:
    """What a node answers to whoever announces this."""

    async def announce() -> str:
        async with connected(Identity.generate(), (address,), LOOPBACK[1:2], client_mode=True) as transport:
            try:
                await transport.call(address.rpartition("/")[2], ANNOUNCE_MANIFEST, manifest.pack(), 20.0)
            except PeerRefusedError as error:
                return str(error)
        return ""

    return asyncio.run(announce())


def announced_while(site: Site, run: Path, address: str) -> str:
    """The invite to a run of whose archive somebody has made a file where a folder should be."""
    with archive(site, "--listen", address.partition("/p2p/")[0]) as (_, again):
        invite = announce_run(run, again)
        folder = site.folder / "archive" / Invite.parse(invite).run_id
        eventually(folder.exists, "the run is not kept")
    folder.rename(site.folder / "was")
    folder.write_text("not a folder")
    return invite


@contextmanager
def archive(site: Site, *arguments: str) -> Iterator[tuple[Command, str]]:
    with site.start(*BOOTSTRAP, *(arguments or LOOPBACK)) as node:
        yield node, node.line(r"/ip4/\S+/p2p/\w+", "the bootstrap node does not say where it is")
        node.signal(signal.SIGINT)
        assert node.finish().code == 0


def archived(site: Site, invite: str) -> int:
    """The outer steps that the archive has."""
    finished = site.run("status", "--run", invite, "--json")
    assert finished.code == 0, finished.err
    peers = json.loads(finished.out)["peers"]
    return next((int(peer["outer_step"]) for peer in peers if peer["state"] == "archiving"), 0)
