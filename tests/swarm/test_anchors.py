"""A run that is founded a second time, with real processes: everybody goes by what an archive has anchored."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.run import Run
from peers.values.identity import Identity
from peers.values.manifest import Invite, SignedManifest
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, Command, Site, announce, bootstrap, eventually, volunteers

pytestmark = pytest.mark.swarm

ARCHIVE = ("bootstrap", "--identity", "archive.pem", "--archive", "archive", *LOOPBACK)


@pytest.mark.thorough
def test_who_comes_back_with_another_founding_leaves_it_for_the_anchored_one(tmp_path: Path) -> None:
    site = Site(tmp_path)
    run = site.write_run(str(write_corpus(tmp_path / "corpus")))
    with archive(site) as (node, address):
        config = RunConfig.from_toml(run).model_copy(update={"anchors": (peer_of(address),)})
        manifest = Run.sign(config, Identity.generate()).manifest
        invite = announce(manifest, address)
        with volunteers(site, invite, "one"):
            node.line(r"outer step \d+ is anchored", "the archive signs nothing")
        kept = archived(site, invite)
        with bootstrap(site) as other, volunteers(site, announce(manifest, other), "two"):
            eventually(lambda: taken(site, "two") > kept + 2, "nobody founds the run again")
        with volunteers(site, invite, "two") as [two]:
            two.line("has signed another outer step", "it does not hear of the anchor")
            two.line("as the anchor .* has signed it: fetching a snapshot", "it does not go over to the archive's log")
            eventually(lambda: known(site, invite, "two"), "it does not keep what it has heard")
            with volunteers(site, invite, "three"):
                eventually(lambda: agree(site, invite, 2), "a newcomer does not join them")
    site.assert_nothing_is_left()


@pytest.mark.thorough
def test_an_organiser_anchors_a_run_by_hand(tmp_path: Path) -> None:
    site = Site(tmp_path)
    run = site.write_run(str(write_corpus(tmp_path / "corpus")))
    with archive(site) as (node, address):
        invite = create(site, run, address)
        with volunteers(site, invite, "one"):
            node.line(r"outer step \d+ is anchored", "the archive signs nothing")
            signed = site.run("anchor", "--run", invite)
        assert signed.code == 0, signed.err
        [step] = re.findall(r"^outer step (\d+) is anchored: ", signed.out)
        shown = json.loads(site.run("status", "--run", invite, "--json").out)["anchored"]
        assert [anchor["anchor"] for anchor in shown] == [organiser(invite, site), peer_of(address)]
        assert shown[0]["outer_step"] == int(step)
    site.assert_nothing_is_left()


def peer_of(address: str) -> str:
    return address.rpartition("/")[2]


def organiser(invite: str, site: Site) -> str:
    manifest = site.folder / f"{Invite.parse(invite).run_id}.manifest"
    return SignedManifest.unpack(manifest.read_bytes()).organiser


@contextmanager
def archive(site: Site) -> Iterator[tuple[Command, str]]:
    with site.start(*ARCHIVE) as node:
        yield node, node.line(r"/ip4/\S+/p2p/\w+", "the archive does not say where it is")
        node.signal(signal.SIGINT)
        assert node.finish().code == 0


def create(site: Site, run: Path, address: str) -> str:
    """The invite to a new run, whose anchors are its organiser and the archive."""
    created = site.run("run", "create", str(run), "--initial-peer", address, "--anchor", peer_of(address))
    assert created.code == 0, created.err
    [invite] = re.findall(r"^invite: +(\S+)$", created.out, re.MULTILINE)
    assert isinstance(invite, str)
    return invite


def status(site: Site, invite: str) -> list[dict[str, object]]:
    finished = site.run("status", "--run", invite, "--json")
    assert finished.code == 0, finished.err
    peers: list[dict[str, object]] = json.loads(finished.out)["peers"]
    return peers


def archived(site: Site, invite: str) -> int:
    """The outer steps that the archive has."""
    steps = (peer["outer_step"] for peer in status(site, invite) if peer["state"] == "archiving")
    return next((step for step in steps if isinstance(step, int)), 0)


def taken(site: Site, name: str) -> int:
    """The outer steps that this volunteer has taken."""
    journal = site.folder / f"{name}.jsonl"
    return len(journal.read_text().splitlines()) if journal.exists() else 0


def known(site: Site, invite: str, name: str) -> bool:
    """Whether a volunteer has on its disk what the anchors have signed."""
    run_id, peer = Invite.parse(invite).run_id, Identity.load(site.folder / f"{name}.pem").peer_id
    return (site.folder / "state" / "diloco-peer" / run_id / peer / "anchors").exists()


def agree(site: Site, invite: str, number: int) -> bool:
    """Whether so many volunteers are in one roster."""
    return any(peer["roster_size"] == number for peer in status(site, invite) if peer["state"] != "archiving")
