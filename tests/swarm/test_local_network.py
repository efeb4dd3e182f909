"""A newcomer that has a run's id and nothing else, in the same local network as a node that says where it is."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from peers.links.neighbours import local_interfaces
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, Finished, Site, announce_run, eventually

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.thorough,
    pytest.mark.skipif(not local_interfaces(), reason="this machine is in no local network"),
]


def test_a_runs_id_alone_leads_to_the_run(tmp_path: Path) -> None:
    site = Site(tmp_path)
    corpus = write_corpus(tmp_path / "corpus")
    site.environment["DILOCO_LOCAL_NETWORK"] = "yes"
    with site.start("bootstrap", "--identity", "bootstrap.pem", *LOOPBACK) as node:
        address = node.line(r"/ip4/\S+/p2p/\w+", "the bootstrap node does not say where it is")
        run_id = announce_run(site.write_run(str(corpus)), address).partition("@")[0].removeprefix("diloco:")
        found: list[Finished] = []

        def is_found() -> bool:
            found[:] = [site.run("status", "--run", run_id, "--json")]
            return found[0].code == 0

        eventually(is_found, "the run is not found in the local network")
        assert json.loads(found[0].out)["run"] == run_id
        node.signal(signal.SIGINT)
        assert node.finish().code == 0
    site.assert_nothing_is_left()
