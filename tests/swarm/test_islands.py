"""Two machines that torchrun makes one volunteer: two of its agents on the loopback interface, and gloo."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from opendiloco.checkpoints.journal import Journal
from tests.child_processes import child_processes
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, SECONDS, Command, Site, announce_run, bootstrap, eventually

pytestmark = pytest.mark.swarm
OUTER_STEPS = 4
ALIKE = ("--threads", "1", "--micro-batch", "1")
EVALUATION = "[evaluation]\nevery = 2\nwindows = 4\n"


class Run(NamedTuple):
    invite: str
    corpus: str

    def join_arguments(self, name: str, *more: str) -> tuple[str, ...]:
        here = ("--identity", f"{name}.pem", "--journal", f"{name}.jsonl", "--device", "cpu", "--data", self.corpus)
        return ("join", "--run", self.invite, *here, *ALIKE, *LOOPBACK, *more)


class Runs(NamedTuple):
    """Both begin anew for each volunteer that is alone in them and has nothing on its disk."""

    short: Run
    endless: Run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    site = Site(tmp_path_factory.mktemp("bootstrap"))
    corpus = str(write_corpus(site.folder / "corpus"))
    with bootstrap(site) as address:

        def announced(outer_steps: int) -> Run:
            path = site.write_run(corpus, outer_steps=outer_steps, inner_steps=5)
            path.write_text(path.read_text() + EVALUATION)
            return Run(announce_run(path, address), corpus)

        yield Runs(announced(OUTER_STEPS), announced(100_000))
    site.assert_nothing_is_left()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    site.environment["GLOO_SOCKET_IFNAME"] = "lo"
    yield site
    site.assert_nothing_is_left()


class Island(NamedTuple):
    """torchrun's agents of two machines: that of the first one, and the other one's."""

    first: Command
    second: Command


@contextmanager
def machines_of(site: Site, *arguments: str, restarts: int = 0) -> Iterator[list[Command]]:
    """Two machines that come together; torchrun chooses which is the first."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
    torchrun = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d")
    meeting = ("--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-id", uuid.uuid4().hex, "--local-addr", "127.0.0.1")
    program = ("--max-restarts", str(restarts), "-m", "--", "opendiloco.cli", *arguments)
    with ExitStack() as stack:
        agents = [stack.enter_context(Command(site, (*torchrun, *meeting, *program))) for _ in range(2)]
        yield agents
    del store


@contextmanager
def island(site: Site, *arguments: str, restarts: int = 0) -> Iterator[Island]:
    """Two machines whose volunteer has joined."""
    with machines_of(site, *arguments, restarts=restarts) as agents:
        yield in_order(agents)


def in_order(agents: list[Command]) -> Island:
    """Tell the two apart, once the volunteer has joined."""
    eventually(lambda: any(agent.said("joining as") or agent.has_ended for agent in agents), "no volunteer joins")
    first, second = sorted(agents, key=lambda agent: not agent.said("joining as"))
    assert first.said("joining as"), [agent.said("") for agent in agents]
    return Island(first, second)


def leave(machines: Island) -> None:
    """Ask one machine to leave: both do. torchrun on the other one would wait for the first's for five minutes."""
    machines.first.signal(signal.SIGTERM)
    for agent in machines:
        agent.line("left the run", "a machine does not leave")
    machines.second.signal(signal.SIGKILL)
    for agent in machines:
        agent.finish()


@pytest.mark.parametrize("sharing", [(), ("--replicas", "2")], ids=["shared once", "a replica on each"])
def test_they_train_as_workers_of_one_machine_do(site: Site, runs: Runs, sharing: tuple[str, ...]) -> None:
    """To the last bit: θ and momentum after each outer step."""
    with island(site, *runs.short.join_arguments("island", *sharing)) as machines:
        machines.first.line("on 2 x cpu on 2 machines", "it does not have both machines' workers")
        machines.first.line(f"outer step {OUTER_STEPS} applied", "it does not train")
        machines.first.line("moments of outer step .* are saved", "moments are not kept")
        leave(machines)
    with site.start(*runs.short.join_arguments("alone", "--cpu-workers", "2", *sharing)) as alone:
        alone.line(f"outer step {OUTER_STEPS} applied", "the other one does not train")
        alone.signal(signal.SIGTERM)
        assert alone.finish().code == 0
    digests = [[digest for _, digest in Journal(site.folder / name)] for name in ("island.jsonl", "alone.jsonl")]
    assert len(digests[0]) == OUTER_STEPS
    assert digests[0] == digests[1]


def process_of(agent: Command) -> int:
    """Return the process that torchrun has started on a machine."""
    [process] = child_processes(agent.pid)
    return process


def test_a_machine_that_is_killed_ends_its_volunteer_in_one_clear_line(site: Site, runs: Runs) -> None:
    with island(site, *runs.endless.join_arguments("island", "--replicas", "2")) as machines:
        machines.first.line("outer step", "it does not train")
        os.kill(process_of(machines.second), signal.SIGKILL)
        machines.first.line("^error: node 1 of this volunteer is lost.*torchrun --max-restarts", "it is not said")
        machines.first.line("exitcode *: 15", "torchrun does not hear of it")
        machines.second.signal(signal.SIGKILL)
        assert machines.first.finish().code != 0


def test_what_is_killed_on_the_second_machine_is_started_again(site: Site, runs: Runs) -> None:
    """A worker by the peer process; the machine's own process by torchrun, with all others. Both go on with the state
    and the moments that the first machine keeps, of which some were on the second one."""
    with island(site, *runs.endless.join_arguments("island"), restarts=3) as machines:
        machines.first.line("moments of outer step .* are saved", "moments are not kept")
        [worker] = child_processes(process_of(machines.second))
        os.kill(worker, signal.SIGKILL)
        killed = "worker 1 of 2, on node 1: the worker was killed by SIGKILL.* The workers start again"
        machines.first.line(killed, "it is not said that a worker is killed")
        machines.first.line("the inner optimizer goes on with what .* has", "the new workers have no moments")
        go_on(machines, "the new workers do not train")
        os.kill(process_of(machines.second), signal.SIGKILL)
        on_either(machines, "this machine goes on after outer step", "it begins anew")
        on_either(machines, "the inner optimizer goes on with .*safetensors$", "it has lost its moments")
        go_on(machines, "the machines that were started again do not train")
        for agent in machines:
            agent.signal(signal.SIGTERM)
        for agent in machines:
            agent.finish()


def test_ctrl_c_on_a_machine_that_is_not_let_in_yet_ends_both(site: Site, runs: Runs) -> None:
    """It waits for torchrun's store then, of which it must not be in the middle."""
    with machines_of(site, *runs.endless.join_arguments("island")) as agents:
        eventually(
            lambda: any(agent.said("waiting for the first machine") for agent in agents), "no machine is the second"
        )
        first, second = sorted(agents, key=lambda agent: bool(agent.said("waiting for the first machine")))
        os.kill(process_of(second), signal.SIGINT)
        first.line("this volunteer leaves|asks this volunteer to leave", "the first machine does not hear of it")
        for agent in agents:
            assert agent.finish().code == 0


def go_on(machines: Island, why: str) -> None:
    """Wait for another outer step."""
    before = len(said_by(machines, "outer step .* applied"))
    eventually(lambda: len(said_by(machines, "outer step .* applied")) > before, why)


def on_either(machines: Island, pattern: str, why: str) -> None:
    """Wait until one of them says it: torchrun may have chosen another first machine."""
    eventually(lambda: said_by(machines, pattern), why)


def said_by(machines: Island, pattern: str) -> list[str]:
    """Return the lines of both in which a pattern is found."""
    return [line for agent in machines for line in agent.said(pattern)]
