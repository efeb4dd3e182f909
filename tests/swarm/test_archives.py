"""A run that is founded a second time, with real processes: everybody goes by what its archive has signed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.run import Run
from peers.values.identity import Identity
from peers.values.manifest import Invite
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, Command, Site, announce, bootstrap, eventually, volunteers

pytestmark = pytest.mark.swarm

ARCHIVE = ("bootstrap", "--identity", "organiser.pem", "--archive", "archive", *LOOPBACK)


@pytest.mark.thorough
def test_who_comes_back_with_another_founding_leaves_it_for_the_signed_one(tmp_path: Path) -> None:
    site = Site(tmp_path)
    config = RunConfig.from_toml(site.write_run(str(write_corpus(tmp_path / "corpus"))))
    with archive(site) as (node, address):
        manifest = Run.sign(config, Identity.load(tmp_path / "organiser.pem")).manifest
        invite = announce(manifest, address)
        with volunteers(site, invite, "one"):
            node.line(r"has signed outer step \d+", "the archive signs nothing")
        shown = status(site, invite)
        assert shown["signed"]["outer_step"] > 0
        kept = next(peer["outer_step"] for peer in shown["peers"] if peer["state"] == "archiving")
        with bootstrap(site) as other, volunteers(site, announce(manifest, other), "two"):
            eventually(lambda: taken(site, "two") > kept + 2, "nobody founds the run again")
        with volunteers(site, invite, "two") as [two]:
            two.line("has signed another outer step", "it does not hear what the archive has signed")
            two.line("fetching a snapshot of .* as the archive .* has signed it", "it does not change over to that log")
            eventually(lambda: known(site, invite, "two"), "it does not keep what it has heard")
            with volunteers(site, invite, "three"):
                eventually(lambda: agree(site, invite, 2), "a newcomer does not join them")
    site.assert_nothing_is_left()


@contextmanager
def archive(site: Site) -> Iterator[tuple[Command, str]]:
    with site.start(*ARCHIVE) as node:
        yield node, node.line(r"/ip4/\S+/p2p/\w+", "the archive does not say where it is")
        node.signal(signal.SIGINT)
        assert node.finish().code == 0


def status(site: Site, invite: str) -> dict[str, Any]:
    finished = site.run("status", "--run", invite, "--json")
    assert finished.code == 0, finished.err
    shown: dict[str, Any] = json.loads(finished.out)
    return shown


def taken(site: Site, name: str) -> int:
    """The outer steps that this volunteer has taken."""
    journal = site.folder / f"{name}.jsonl"
    return len(journal.read_text().splitlines()) if journal.exists() else 0


def known(site: Site, invite: str, name: str) -> bool:
    """Whether a volunteer has on its disk what the archive has signed."""
    run_id, peer = Invite.parse(invite).run_id, Identity.load(site.folder / f"{name}.pem").peer_id
    return (site.folder / "state" / "diloco-peer" / run_id / peer / "signed_heads").exists()


def agree(site: Site, invite: str, number: int) -> bool:
    """Whether so many volunteers are in one roster."""
    peers = status(site, invite)["peers"]
    return any(peer["roster_size"] == number for peer in peers if peer["state"] != "archiving")
