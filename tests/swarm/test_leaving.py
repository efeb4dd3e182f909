"""How a volunteer leaves: asked politely, urged, before it has begun, and killed. Nothing of it is ever left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, Command, Site, announce_run, bootstrap, eventually
from tests.swarm.terminals import Terminal

pytestmark = pytest.mark.swarm


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.assert_nothing_is_left()


class Run(NamedTuple):
    invite: str
    corpus: str

    def join_arguments(self, identity: str) -> tuple[str, ...]:
        here = ("--identity", identity, "--device", "cpu", "--data", self.corpus)
        return ("join", "--run", self.invite, *here, *LOOPBACK)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run without end, which begins anew for each test: whoever comes after the last has left starts it again."""
    site = Site(tmp_path_factory.mktemp("bootstrap"))
    corpus = str(write_corpus(site.folder / "corpus"))
    with bootstrap(site) as address:
        yield Run(announce_run(site.write_run(corpus), address), corpus)
    site.assert_nothing_is_left()


def join(site: Site, run: Run, identity: str, *more: str) -> Command:
    return site.start(*run.join_arguments(identity), *more)


def test_the_others_go_on(site: Site, run: Run) -> None:
    with join(site, run, "one.pem") as first, join(site, run, "two.pem") as second:
        second.line("outer step .* 2 peers", "the two do not train together")
        first.interrupt_terminal()
        left = first.finish()
        assert left.code == 0, left.err
        assert "leaving the run" in left.out
        assert "left the run" in left.out
        second.line("outer step .* 1 peer, ", "the other one does not go on")
        second.signal(signal.SIGTERM)
        assert second.finish().code == 0


@pytest.mark.thorough
def test_a_second_ctrl_c_does_not_wait(site: Site, run: Run) -> None:
    with join(site, run, "one.pem") as volunteer:
        volunteer.line("outer step", "it does not train")
        os.kill(volunteer.children()["p2pd"], signal.SIGSTOP)  # so that saying goodbye takes its time
        volunteer.signal(signal.SIGINT)
        volunteer.line("leaving the run", "the first Ctrl-C goes unheard")
        volunteer.signal(signal.SIGINT)
        assert volunteer.finish().code == 130


def test_before_it_has_begun(site: Site, run: Run) -> None:
    with join(site, run, "one.pem") as volunteer:
        volunteer.line("starting a worker", "it does not find the run")
        volunteer.signal(signal.SIGINT)
        left = volunteer.finish()
        assert left.code == 0
        assert "ERROR" not in left.err


@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["waiting for a place", "outer step"])
def test_all_its_processes_are_asked_at_once(site: Site, run: Run, moment: str) -> None:
    """As systemd stops a service. libp2p's daemon does as it is told; that is no error when we are leaving anyway."""
    with join(site, run, "one.pem") as volunteer:
        volunteer.line(moment, "it does not come to train")
        for process in (volunteer.pid, *volunteer.children().values()):
            os.kill(process, signal.SIGTERM)
        left = volunteer.finish()
        assert left.code == 0, left.err
        assert "left the run" in left.out
        assert "Traceback" not in left.err


@pytest.mark.thorough
@pytest.mark.parametrize("options", [[], ["--plain"]], ids=["screen", "plain"])
def test_its_terminal_is_closed(site: Site, run: Run, options: list[str]) -> None:
    with Terminal(site, *run.join_arguments("one.pem"), *options) as terminal:
        for stage in (b"importing torch", b"tokenizing", b"building the model"):
            terminal.wait_for(stage, "nobody who watches sees what its start is busy with")
        terminal.wait_for(b"outer step" if options else b"this machine", "it does not train")
        terminal.close()
        assert terminal.finish() == 0
    assert "no live peers" in site.run("status", "--run", run.invite).out  # it has said goodbye


def test_killed(site: Site, run: Run) -> None:
    """Worker and daemon end by themselves; the daemon's socket is swept away by whoever starts next."""
    with join(site, run, "one.pem") as volunteer:
        volunteer.line("outer step", "it does not train")
        volunteer.signal(signal.SIGKILL)
        assert volunteer.finish().code == -signal.SIGKILL
    assert site.run("status", "--run", run.invite).code == 0


def kill_worker(volunteer: Command) -> None:
    """As soon as there is one: that workers start again is said before they do."""

    def workers() -> list[int]:
        return [process for name, process in volunteer.children().items() if name != "p2pd"]

    eventually(workers, "it has no worker")
    [worker] = workers()
    os.kill(worker, signal.SIGKILL)


def test_a_killed_worker_is_started_again_and_ends_its_peer_when_that_is_too_often(site: Site, run: Run) -> None:
    with join(site, run, "one.pem", "--restarts", "1") as volunteer:
        volunteer.line("outer step", "it does not train")
        kill_worker(volunteer)
        volunteer.line("killed by SIGKILL.* The workers start again", "no worker is started again")
        kill_worker(volunteer)
        finished = volunteer.finish()
        assert finished.code == 8
        assert "killed by SIGKILL" in finished.err
        assert "Traceback" not in finished.err
