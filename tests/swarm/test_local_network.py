"""A newcomer that has a run's id and nothing else, in the same local network as a node that says where it is: a network
of this test's own, in which no other node of this machine is heard."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOCAL_NETWORK, Finished, Site, create_run, eventually
from tests.swarm.networks import NetworkError, Place, network

pytestmark = [pytest.mark.swarm, pytest.mark.thorough]


def test_a_runs_id_alone_leads_to_the_run(tmp_path: Path) -> None:
    try:
        with network(1) as home:
            leads_to_the_run(Site(tmp_path), home.places[0])
    except NetworkError as error:
        pytest.skip(f"no network of its own here: {error}")


def leads_to_the_run(site: Site, home: Place) -> None:
    run = site.write_run(str(write_corpus(site.folder / "corpus")))
    site.environment[LOCAL_NETWORK] = "yes"
    with site.start(
        "bootstrap", "--identity", "bootstrap.pem", "--listen", home.listen, "--data-port", "0", prefix=home.prefix
    ) as node:
        address = node.line(r"/ip4/\S+/p2p/\w+", "the bootstrap node does not say where it is")
        run_id = create_run(site, run, address, home.prefix).partition("@")[0].removeprefix("diloco:")
        found: list[Finished] = []

        def is_found() -> bool:
            found[:] = [site.run("status", "--run", run_id, "--json", prefix=home.prefix)]
            return found[0].code == 0

        eventually(is_found, "the run is not found in the local network")
        assert json.loads(found[0].out)["run"] == run_id
        node.signal(signal.SIGINT)
        assert node.finish().code == 0
    site.assert_nothing_is_left()
