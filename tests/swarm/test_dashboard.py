"""Dashboards and metrics of real processes: a bootstrap node with an archive, a volunteer, a follower."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, Command, Site, announce_run, eventually, leave

pytestmark = pytest.mark.swarm

SHOWN = ("--dashboard", "127.0.0.1:0", "--metrics-port", "0")


def dashboard_of(command: Command) -> str:
    line = command.line(r"The dashboard is at http://127\.0\.0\.1:\d+/", "it does not say where its dashboard is")
    return line.removeprefix("The dashboard is at ")


def health_of(command: Command) -> tuple[int, Any]:
    line = command.line(r"http://127\.0\.0\.1:\d+/metrics", "it does not say where its metrics are")
    with urllib.request.urlopen(line.replace("/metrics", "/healthz"), timeout=30) as answer:
        return answer.status, json.load(answer)


def read(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def seen(base: str, run: str, condition: Callable[[Any], bool], why: str) -> Any:
    """What a dashboard says of a run as soon as a condition is true of it."""
    found: list[Any] = []

    def is_so() -> bool:
        known = {one["run"] for one in read(f"{base}api/runs")}
        found[:] = [read(f"{base}api/runs/{run}")] if run in known else []
        return bool(found) and condition(found[0])

    eventually(is_so, why)
    return found[0]


@pytest.mark.thorough
def test_who_trains_who_follows_and_who_archives_show_the_same_run(tmp_path: Path) -> None:
    site = Site(tmp_path)
    write_corpus(site.folder / "corpus")
    archive = ("--archive", "archive")
    with site.start("bootstrap", "--identity", "bootstrap.pem", *archive, *SHOWN, *LOOPBACK) as node:
        address = node.line(r"/ip4/\S+/p2p/\w+", "the bootstrap node does not say where it is")
        invite = announce_run(site.write_run("corpus", peers=2), address)
        run = re.sub(r"^diloco:|@.*", "", invite).split("/")[0]
        options = ("join", "--run", invite, "--device", "cpu", "--data", "corpus", "--plain", *LOOPBACK)
        with (
            site.start(*options, "--identity", "one.pem", *SHOWN) as first,
            site.start(*options, "--identity", "two.pem", "--team", "blue") as second,
            site.start("follow", "--run", invite, "--json", "--dashboard", "127.0.0.1:0") as follower,
        ):
            views = {}
            for name, command in {"archive": node, "follower": follower}.items():
                views[name] = seen(
                    dashboard_of(command), run, is_whole, f"the {name} does not show who has contributed"
                )
            volunteer = seen(
                dashboard_of(first),
                run,
                lambda view: (
                    is_whole(view) and knows_an_archive(view) and all(agree(view, one) for one in views.values())
                ),
                "the volunteer does not show the entries that the others show",
            )
            assert volunteer["run"]["me"] in {row["peer"] for row in volunteer["contributions"]["rows"]}
            assert views["archive"]["run"]["me"] == ""
            for command in (node, first):
                assert health_of(command) == (200, {"healthy": True, "reasons": []})
            follower.signal(signal.SIGINT)
            assert follower.finish().code == 0
            for command in (first, second):
                leave(command)
        node.signal(signal.SIGINT)
        assert node.finish().code == 0
    site.assert_nothing_is_left()


def is_whole(view: Any) -> bool:
    """Whether a view has something to show in each of its parts, teams included."""
    entries = [row for row in view["rounds"]["rows"] if "digest" in row]
    has_log = bool(entries) and entries[-1]["voters"] == 2 and not view["run"]["no_log"]
    board = view["contributions"]
    teams = [(row["team"], row["peers"]) for row in board["teams"]]
    is_complete = len(board["rows"]) == 2 and bool(view["losses"]["training"])
    return has_log and is_complete and teams == [("blue", 1)]


def knows_an_archive(view: Any) -> bool:
    return "archiving" in {row["state"] for row in view["peers"]["rows"]}


def agree(one: Any, other: Any) -> bool:
    """Whether both show entries of the same places, which are the same."""
    first, second = digests(one), digests(other)
    both = first.keys() & second.keys()
    assert all(first[index] == second[index] for index in both), "they show different entries of one place"
    return bool(both)


def digests(view: Any) -> dict[int, str]:
    return {row["index"]: row["digest"] for row in view["rounds"]["rows"] if "digest" in row}
