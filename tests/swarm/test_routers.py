"""The small internet itself: what its routers let through, and what not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.swarm.routers import Internet, Kind, Machine

pytestmark = [pytest.mark.swarm, pytest.mark.thorough]
DEADLINE = 120.0  # seconds for a process to say something
WAIT = 1.0  # seconds after which a connection is taken to be dropped
FAMILY = "socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET"
BOUND = f"""
import json, socket, sys, time
def bound(address, port):
    s = socket.socket({FAMILY})
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        s.setsockopt(socket.SOL_SOCKET, option, 1)
    s.bind((address, port))
    return s
"""
SERVE = f"""{BOUND}
s = bound(sys.argv[1], int(sys.argv[2]))
s.listen()
print("ready", flush=True)
while True:
    connection, whence = s.accept()
    connection.sendall(json.dumps(whence[:2]).encode())
    connection.close()
"""
DIAL = f"""{BOUND}
s = bound("", int(sys.argv[3]))
s.settimeout(float(sys.argv[4]))
try:
    s.connect((sys.argv[1], int(sys.argv[2])))
    print(s.recv(100).decode())
except TimeoutError:
    print("null")
"""
PUNCH = f"""{BOUND}
other, port, until = sys.argv[1], int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
while time.monotonic() < until:
    s = bound("", port)
    s.settimeout(0.5)
    try:
        s.connect((other, port))
    except (TimeoutError, ConnectionError):
        s.close()
        continue
    s.settimeout(None)
    s.sendall(b"1")
    print(len(s.recv(1)))
    break
else:
    print("null")
"""
PORT, WEB_PORT, SOURCE = 31337, 443, 40000


@pytest.fixture(scope="module")
def servers(net: Internet) -> Iterator[list[Machine]]:
    """Two public machines that tell whoever dials them where it came from."""
    with ExitStack() as stack:
        machines = [net.machine(Kind.OPEN) for _ in range(2)]
        for machine in machines:
            for address, port in ((machine.address, PORT), (machine.address, WEB_PORT), (machine.address6, PORT)):
                serve(machine, address, port, stack)
        yield machines


def start(machine: Machine, program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [*machine.prefix, sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> object:
    said, _ = process.communicate(timeout=DEADLINE)
    return json.loads(said)


def serve(machine: Machine, address: str, port: int, stack: ExitStack) -> None:
    process = stack.enter_context(start(machine, SERVE, address, port))
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def dial(machine: Machine, address: str, port: int = PORT, wait: float = DEADLINE / 2) -> object:
    """From which address and port the one dialled sees us; None when nothing comes back."""
    return answer(start(machine, DIAL, address, port, SOURCE, wait))


@pytest.mark.parametrize(
    ("kind", "keeps_ports"), [(Kind.OPEN, True), (Kind.CONE, True), (Kind.SYMMETRIC, False), (Kind.CGNAT, False)]
)
def test_connections_go_out(net: Internet, servers: list[Machine], kind: Kind, keeps_ports: bool) -> None:
    machine = net.machine(kind)
    seen = [dial(machine, server.address) for server in servers]
    assert seen[0] is not None
    assert (seen[0] == seen[1]) == keeps_ports


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.OPEN])
def test_nothing_comes_in_unasked(net: Internet, servers: list[Machine], kind: Kind) -> None:
    machine = net.machine(kind)
    public = machine.address6 or machine.public_address
    with ExitStack() as stack:
        serve(machine, machine.address6 or machine.address, PORT, stack)
        assert dial(servers[0], public, wait=WAIT) is None


def test_a_web_firewall_passes_only_the_web(net: Internet, servers: list[Machine]) -> None:
    machine = net.machine(Kind.WEB)
    assert dial(machine, servers[0].address, WEB_PORT) is not None
    assert dial(machine, servers[0].address, wait=WAIT) is None


def test_an_ipv6_machine_reaches_ipv6(net: Internet, servers: list[Machine]) -> None:
    machine = net.machine(Kind.IPV6)
    assert dial(machine, servers[0].address6) == [machine.address6, SOURCE]


@pytest.mark.parametrize(("kinds", "works"), [((Kind.CONE, Kind.CONE), True), ((Kind.CONE, Kind.SYMMETRIC), False)])
def test_both_dial_at_once(net: Internet, kinds: tuple[Kind, Kind], works: bool) -> None:
    one, other = (net.machine(kind) for kind in kinds)
    wait = DEADLINE / 2 if works else WAIT
    dialling = [
        start(one, PUNCH, other.public_address, PORT, wait),
        start(other, PUNCH, one.public_address, PORT, wait),
    ]
    assert [answer(process) for process in dialling] == [1 if works else None] * 2


def test_a_machine_moves(net: Internet, servers: list[Machine]) -> None:
    before = net.machine(Kind.CONE)
    after = net.move(before, Kind.SYMMETRIC)
    assert after.namespace == before.namespace
    assert after.public_address != before.public_address
    seen = dial(after, servers[0].address)
    assert isinstance(seen, list)
    assert seen[0] == after.public_address


def test_a_machine_is_unplugged(net: Internet, servers: list[Machine]) -> None:
    machine = net.machine(Kind.CONE)
    net.unplug(machine)
    assert dial(machine, servers[0].address, wait=WAIT) is None
    net.plug(machine)
    assert dial(machine, servers[0].address) is not None
