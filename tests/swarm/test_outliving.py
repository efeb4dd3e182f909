"""A run goes on after everybody has left: from what the machines have kept, or from an archive."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from opendiloco.storage.run_folder import Journal
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, Site, announce_run, eventually, volunteers

pytestmark = pytest.mark.swarm

BOOTSTRAP = ("bootstrap", "--identity", "bootstrap.pem", "--archive", "archive", "--data-port", "0")


def test_a_run_outlives_its_volunteers(tmp_path: Path) -> None:
    """All leave, and the archive is started anew. A stranger goes on from what it has; who comes back has its own."""
    site = Site(tmp_path)
    corpus = write_corpus(tmp_path / "corpus")
    with archive(site) as address:
        invite = announce_run(site.write_run(str(corpus)), address)
        with volunteers(site, invite, "one", "two"):
            eventually(lambda: index_of(site, "one") >= 6, "nobody comes to outer step 6")
            eventually(lambda: payloads(site) >= 5, "the archive does not follow the run")
            eventually(lambda: archived(site, invite) >= 5, "the archive does not say what it has")
    listen = address.partition("/p2p/")[0]
    with archive(site, "--listen", listen):
        with volunteers(site, invite, "three"):
            eventually(lambda: index_of(site, "three") >= 7, "nobody goes on from the archive")
            left_at = index_of(site, "two")
            with volunteers(site, invite, "two") as [two]:
                two.line(f"goes on after outer step {left_at}", "it begins anew")
                two.line(
                    r"inner optimizer continues with the moments loaded from outer-step-\d+", "its moments are new"
                )
                eventually(lambda: index_of(site, "two") > left_at + 1, "who comes back is not taken in")
                eventually(lambda: agree(site, "two", "three"), "two lineages stay two")
        a_log_is_sound(site, invite)
    site.assert_nothing_is_left()


@contextmanager
def archive(site: Site, *arguments: str) -> Iterator[str]:
    with site.start(*BOOTSTRAP, *(arguments or LOOPBACK)) as node:
        yield node.line(r"/ip4/\S+/p2p/\w+", "the bootstrap node does not say where it is")
        node.signal(signal.SIGINT)
        assert node.finish().code == 0


def index_of(site: Site, name: str) -> int:
    """Outer steps taken, as this volunteer's journal says."""
    return max(lineage(site, name), default=-1) + 1


def agree(site: Site, one: str, other: str) -> bool:
    """On the newest entry that both have applied, and on the state after it. What the archive lacked may be lost."""
    ours, theirs = lineage(site, one), lineage(site, other)
    index = max(ours.keys() & theirs.keys(), default=None)
    return index is not None and ours[index] == theirs[index]


def lineage(site: Site, name: str) -> dict[int, tuple[bytes, bytes]]:
    """The entries that a volunteer has applied, and the states after them, without those of a branch that it left: who
    moves to another one may begin there with a state that is older than its own, and then be many steps behind."""
    entries: dict[int, tuple[bytes, bytes]] = {}
    for header, state in Journal(site.folder / f"{name}.jsonl"):
        entries = {index: entry for index, entry in entries.items() if index < header.index}
        entries[header.index] = header.digest, state
    return entries


def payloads(site: Site) -> int:
    """Return the number of payloads that the archive has written."""
    return len(list((site.folder / "archive").rglob("*.payload")))


def archived(site: Site, invite: str) -> int:
    """The outer steps that the archive has, as its heartbeats say."""
    finished = site.run("status", "--run", invite, "--json")
    assert finished.code == 0, finished.err
    peers = json.loads(finished.out)["peers"]
    return next((int(peer["outer_step"]) for peer in peers if peer["state"] == "archiving"), 0)


def a_log_is_sound(site: Site, invite: str) -> None:
    """What a volunteer has kept, through a fork and a return."""
    run_id = invite.partition("@")[0].removeprefix("diloco:")
    folder = min((site.folder / "state" / "diloco-peer" / run_id).iterdir())
    verified = site.run("log", "verify", "--folder", str(folder))
    assert verified.code == 0, verified.out + verified.err
