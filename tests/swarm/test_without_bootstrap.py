"""A run goes on when its bootstrap node is gone, and is found again by those who were in it."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from opendiloco.storage.run_folder import Journal
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, Command, Site, announce_run, eventually, leave, volunteers

pytestmark = pytest.mark.swarm


@pytest.mark.thorough
def test_a_run_goes_on_without_its_bootstrap_node(tmp_path: Path) -> None:
    """Its node is killed: two go on, a stranger finds the run through one of them, and one who left comes back."""
    site = Site(tmp_path)
    corpus = write_corpus(tmp_path / "corpus")
    with ExitStack() as running:
        with site.start("bootstrap", "--identity", "bootstrap.pem", *LOOPBACK) as node:
            address = node.line(r"/ip4/\S+/p2p/\w+", "the bootstrap node does not say where it is")
            invite = announce_run(site.write_run(str(corpus)), address)
            *peers, three = running.enter_context(volunteers(site, invite, "one", "two", "three"))
            known = remembered(site, invite, three)
            eventually(lambda: {peer_of(each) for each in peers} <= known().keys(), "three remembers nobody")
            eventually(lambda: index_of(site, "three") >= 2, "three takes no part")
            leave(three)
            node.signal(signal.SIGKILL)
            node.finish()
        left_at = index_of(site, "one")
        eventually(lambda: index_of(site, "one") > left_at + 2, "without a bootstrap node nothing goes on")
        run_id = invite.partition("@")[0]
        through_one = f"{run_id}@{known()[peer_of(peers[0])][0]}"
        found = site.run("status", "--run", through_one, "--json")
        assert found.code == 0, found.err
        assert {peer["peer"] for peer in json.loads(found.out)["peers"]} >= {peer_of(each) for each in peers}
        by_id = site.run("status", "--run", run_id.removeprefix("diloco:"), "--json")
        assert by_id.code == 0, f"what this machine remembers of the run is not used: {by_id.err}"
        with volunteers(site, run_id.removeprefix("diloco:"), "three"):
            been = index_of(site, "three")
            eventually(lambda: index_of(site, "three") > been + 1, "who comes back is not taken in")
    site.assert_nothing_is_left()


def peer_of(volunteer: Command) -> str:
    match = re.search(r"\w+$", volunteer.line(r"joining as \w+", "it does not say who it is"))
    assert match
    return match[0]


def remembered(site: Site, invite: str, volunteer: Command) -> Callable[[], dict[str, list[str]]]:
    """Returns a function for the addresses that a volunteer remembers, by peer."""
    run_id = invite.partition("@")[0].removeprefix("diloco:")
    path = site.folder / "state" / "diloco-peer" / run_id / peer_of(volunteer) / "peers.json"

    def known() -> dict[str, list[str]]:
        content = json.loads(path.read_text()) if path.exists() else {"peers": []}
        return {entry["peer"]: entry["addresses"] for entry in content["peers"]}

    return known


def index_of(site: Site, name: str) -> int:
    """Outer steps taken, as this volunteer's journal says."""
    return max((header.index + 1 for header, _ in Journal(site.folder / f"{name}.jsonl")), default=0)
