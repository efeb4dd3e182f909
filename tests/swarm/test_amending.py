"""An organiser changes the outer learning rate of a run that goes on, with real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peers.values.manifest import Invite
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import Site, bootstrap, create_run, eventually, volunteers

pytestmark = pytest.mark.swarm

LOWERED = {"number": 1, "outer_learning_rate": 0.35, "weights": [2.0]}


@pytest.mark.thorough
def test_the_outer_learning_rate_is_lowered_for_all_and_for_whoever_joins(tmp_path: Path) -> None:
    site = Site(tmp_path)
    run = site.write_run(str(write_corpus(tmp_path / "corpus")))
    with bootstrap(site) as address:
        invite = create_run(site, run, address)
        with volunteers(site, invite, "one", "two"):
            eventually(lambda: trains_with(site, invite, 2, 0.7), "two do not train")
            refused = site.run("run", "amend", "--run", invite, "--identity", "one.pem", "--outer-lr", "0.35")
            assert refused.code == 3, refused.err
            given = site.run("run", "amend", "--run", invite, "--outer-lr", "0.35", *("--mixture", "#1=2"))
            assert given.code == 0, given.err
            assert given.out.startswith("amendment 1 (outer learning rate 0.35, weights 2); ")
            eventually(lambda: status(site, invite)["in_force"]["amendment"] == LOWERED, "it is not in force")
            with volunteers(site, invite, "three"):
                eventually(lambda: trains_with(site, invite, 3, 0.35), "a newcomer does not agree with them")
                given = site.run("run", "amend", "--run", invite, "--inner-lr-factor", "0.5", "--decay-steps", "2")
                assert given.code == 0, given.err
                eventually(lambda: is_over(site, invite, 3), "the run does not end with the decay")
                too_late = site.run("run", "amend", "--run", invite, "--outer-steps", "10000")
                assert too_late.code == 3
                assert "has taken its last outer step" in too_late.err
        for folder in (tmp_path / "state" / "diloco-peer" / Invite.parse(invite).run_id).iterdir():
            verified = site.run("log", "verify", "--folder", str(folder))
            assert verified.code == 0, verified.out + verified.err
    site.assert_nothing_is_left()


def status(site: Site, invite: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(site.run("status", "--run", invite, "--json").out)
    return shown


def is_over(site: Site, invite: str, peers: int) -> bool:
    """Whether so many are at the end of the run, and agree; the decay began with an outer step that none had taken."""
    shown = status(site, invite)
    decay, outer_steps = shown["in_force"]["decay"], shown["in_force"]["outer_steps"]
    at_the_end = [(peer["state"], peer["outer_step"]) for peer in shown["peers"]]
    return bool(
        decay
        and decay["after"] + 2 == outer_steps
        and at_the_end == [("finished", outer_steps)] * peers
        and shown["agree"]
    )


def trains_with(site: Site, invite: str, peers: int, learning_rate: float) -> bool:
    """Whether so many are in the last roster, all agree, and this is in force."""
    shown = status(site, invite)
    is_whole = [peer["roster_size"] for peer in shown["peers"]] == [peers] * peers
    return bool(is_whole and shown["agree"] and shown["in_force"]["outer_learning_rate"] == learning_rate)
