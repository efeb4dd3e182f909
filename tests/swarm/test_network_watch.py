"""A machine that is carried to another network notices it, from what the kernel says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.swarm.routers import Internet, Kind, Machine

pytestmark = [pytest.mark.swarm, pytest.mark.thorough]

WATCH = """
import asyncio, json
from peers.network.own_network import _observe, watch_network

def say(what):
    print(json.dumps(what), flush=True)

first = _observe()
looks = [first]
say(sorted(first[1]))
look = lambda: looks.pop() if looks else _observe()
asyncio.run(watch_network(lambda: say("changed"), look))
"""


@contextmanager
def watching(machine: Machine) -> Iterator[Iterator[object]]:
    """Yields what the machine says: its networks, then "changed" each time. The test's own time limit ends the wait."""
    command = [*machine.prefix, sys.executable, "-c", WATCH]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield map(json.loads, process.stdout)
        finally:
            process.kill()


@pytest.mark.parametrize(("before", "after"), [(Kind.CONE, Kind.SYMMETRIC), (Kind.OPEN, Kind.CONE)])
def test_a_machine_that_moves_notices_it(net: Internet, before: Kind, after: Kind) -> None:
    machine = net.machine(before)
    with watching(machine) as said:
        networks = next(said)
        assert isinstance(networks, list)
        assert f"{machine.address} by {machine.address.rpartition('.')[0]}.1" in networks
        net.move(machine, after)
        assert next(said) == "changed"


def test_an_ipv6_machine_that_moves_notices_it(net: Internet) -> None:
    machine = net.machine(Kind.IPV6)
    with watching(machine) as said:
        networks = next(said)
        assert isinstance(networks, list)
        assert networks == [f"{machine.address6.rpartition('::')[0]}::/64"]
        net.move(machine, Kind.CONE)
        assert next(said) == "changed"
