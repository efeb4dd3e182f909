"""The commands as people type them, on machines behind routers: a run from its start to its end, in one lineage."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from opendiloco.storage.run_folder import Journal
from peers.log.header import Header
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import SECONDS, Command, Site, create_run, eventually
from tests.swarm.routers import Internet, Kind, Machine

pytestmark = [pytest.mark.swarm, pytest.mark.thorough]
OUTER_STEPS = 6
NAMES = ("one", "two")


@contextmanager
def volunteer(site: Site, machine: Machine, invite: str, name: str) -> Iterator[Command]:
    """One that is told nothing of its network, and leaves politely in the end."""
    options = ("--identity", f"{name}.pem", "--journal", f"{name}.jsonl", "--data", "corpus")
    with site.start("join", "--run", invite, *options, prefix=machine.prefix) as command:
        yield command
        command.signal(signal.SIGTERM)
        assert command.finish().code == 0


def test_two_volunteers_behind_symmetric_routers_train_a_run_to_its_end(net: Internet, tmp_path: Path) -> None:
    site, public = Site(tmp_path), net.machine(Kind.OPEN)
    corpus = write_corpus(tmp_path / "corpus")
    with site.start("bootstrap", "--identity", "bootstrap.pem", prefix=public.prefix) as node:
        address = node.line(rf"/ip4/{public.address}/\S+/p2p/\w+", "the bootstrap node does not say where it is")
        invite = create_run(site, site.write_run(str(corpus), OUTER_STEPS, peers=2), address, public.prefix)
        machines = [net.machine(Kind.SYMMETRIC) for _ in range(2)]
        with (
            volunteer(site, machines[0], invite, "one") as first,
            volunteer(site, machines[1], invite, "two") as second,
        ):
            for command in (first, second):
                command.line("joining as", "a volunteer does not start", 2 * SECONDS)
            eventually(lambda: all(max(entries(site, name), default=0) + 1 == OUTER_STEPS for name in NAMES), "no end")
            header, _ = ending = entries(site, "one")[OUTER_STEPS - 1]
            assert entries(site, "two")[OUTER_STEPS - 1] == ending, "two lineages"
            assert len(header.roster) == 2
            status = json.loads(site.run("status", "--run", invite, "--json", prefix=public.prefix).out)
            assert status["agree"] is True
            assert [peer["reach"] for peer in status["peers"]] == ["NAT", "NAT"]
            one, two = (peer["peer"][-8:] for peer in status["peers"])
            assert [peer["relayed"] for peer in status["peers"]] == [[two], [one]]
            assert not any(peer["unreached"] or peer["trouble"] for peer in status["peers"])
        node.signal(signal.SIGINT)
        assert node.finish().code == 0
    site.assert_nothing_is_left()


def entries(site: Site, name: str) -> dict[int, tuple[Header, bytes]]:
    """What a volunteer has applied: the last that it says of each entry."""
    return {header.index: (header, state) for header, state in Journal(site.folder / f"{name}.jsonl")}
