"""`diloco-peer runs` against a real bootstrap node, with a volunteer in one of its runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import Site, announce_run, bootstrap, volunteers

pytestmark = [pytest.mark.swarm, pytest.mark.thorough]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.assert_nothing_is_left()


def test_a_bootstrap_node_tells_its_runs(site: Site) -> None:
    corpus = str(write_corpus(site.folder / "corpus"))
    with bootstrap(site) as address:
        nothing = site.run("runs", "--initial-peer", address)
        assert nothing.code == 0, nothing.err
        assert "No open runs." in nothing.out

        invites = [announce_run(site.write_run(corpus, inner_steps=steps), address) for steps in (20, 21)]
        with volunteers(site, invites[0], "one"):
            listed = site.run("runs", "--initial-peer", address, "--json")
        assert listed.code == 0, listed.err
        runs = {run["run"]: run for run in json.loads(listed.out)}
        counts = [len(runs[run]["peers"]) for invite in invites for run in runs if run in invite]
        assert counts == [1, 0]
        assert all(run["needs"]["parameters"] > 0 for run in runs.values())

        shown = site.run("runs", "--initial-peer", address, "--no-needs", "--limit", "1")
        assert "diloco-peer join --run" in shown.out
        assert sum(run in shown.out for run in runs) == 1


def test_without_a_node_the_error_says_how_to_get_one(site: Site) -> None:
    refused = site.run("runs")
    assert refused.code == 2
    for remedy in ("--initial-peer", "DILOCO_INITIAL_PEERS", "diloco-peer bootstrap"):
        assert remedy in refused.err
