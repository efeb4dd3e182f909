"""An owner's say over a real volunteer: pause, resume and finish. A long pause frees the memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest

from opendiloco.owner.controls import OwnerRequest, ask, volunteers
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, Site, announce_run, bootstrap, eventually

pytestmark = pytest.mark.swarm
UNKNOWN = "small-4g7u4kmrxjywblfd5f42e2lu5qn7cwx4"
NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWKYEu8bBjQxRZNSgbeQFnCu5HkMyAKLiWKP8naSpCUJoy"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.assert_nothing_is_left()


@pytest.fixture
def invite(site: Site) -> Iterator[str]:
    corpus = str(write_corpus(site.folder / "corpus"))
    with bootstrap(site) as address:
        yield announce_run(site.write_run(corpus), address)


def tell(site: Site, do: Any) -> str:
    """What the one volunteer of a site says to a command."""
    [socket] = volunteers(site.folder / "state" / "diloco-peer")
    answer = ask(socket, OwnerRequest(do=do))
    assert answer is not None
    return answer.says


def shared_memory_of(process: psutil.Process) -> list[str]:
    """Return the memory files that a process has mapped."""
    return [memory.path for memory in process.memory_maps() if "memfd:diloco-peer" in memory.path]


def test_pause_resume_and_finish(site: Site, invite: str) -> None:
    here = ("--identity", "one.pem", "--device", "cpu", "--data", "corpus", "--nice", "5", "--max-memory", "8")
    with site.start("join", "--run", invite, *here, *LOOPBACK) as volunteer:
        volunteer.line("outer step 1 applied", "it does not train")
        us = psutil.Process(volunteer.pid)
        [worker] = [process for process in us.children() if "opendiloco.workers.worker" in process.cmdline()]
        assert worker.nice() == min(19, us.nice() + 5)
        assert shared_memory_of(us)

        # a pause that others wait for
        assert tell(site, "pause") == "pausing"
        volunteer.line("paused: you asked for it", "it does not pause")
        assert tell(site, "resume") == "training goes on"

        # a longer one
        assert "pausing" in site.run("pause").out
        volunteer.line("the pause is long", "it does not leave when the pause is long")
        eventually(lambda: volunteer.children() == {}, "it keeps processes")
        eventually(lambda: not shared_memory_of(us), "it keeps the weights in memory")
        seen = json.loads(site.run("status", "--run", invite, "--json").out)
        assert [one["paused"] for one in seen["here"]] == [["you asked for it"]]
        assert seen["peers"] == []
        assert not volunteer.said("left the run"), "a paused volunteer says that it has left"

        # and its end
        assert tell(site, "resume") == "joining the run"
        volunteer.line("this machine goes on after outer step", "it does not come back from its disk")
        eventually(lambda: len(volunteer.said("joining as")) == 2, "it does not join again")
        assert tell(site, "finish") == "leaving after this outer step"
        finished = volunteer.finish()
        assert finished.code == 0, finished.err
        assert "the outer step is done" in finished.out
        assert "Traceback" not in finished.err


@pytest.mark.thorough
def test_a_condition_keeps_it_from_starting(site: Site) -> None:
    """The run is one that nobody knows: it would fail as soon as it looked for it."""
    here = ("--run", UNKNOWN, "--initial-peer", NOBODY, "--identity", "one.pem", "--pause-when", "process:sh")
    shown = ("--dashboard", "127.0.0.1:0")
    with site.start("join", *here, *shown, *LOOPBACK, prefix=("sh", "-c", '"$@"; exit $?', "sh")) as volunteer:
        volunteer.line("paused: .*sh runs", "it does not see the program")
        [line] = volunteer.said("The dashboard is at")
        with urlopen(f"{line.split()[-1]}api/runs", timeout=20) as answer:
            assert json.load(answer) == [], "it listened, and did not answer"
        assert "still paused: sh runs" in site.run("resume").out
        assert "leaving" in site.run("finish").out
        assert volunteer.finish().code == 0


@pytest.mark.thorough
def test_nobody_is_there_to_be_told(site: Site) -> None:
    told = site.run("pause")
    assert told.code == 6
    assert "no volunteer in" in told.err
