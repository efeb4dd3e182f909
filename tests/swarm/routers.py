"""A small internet of network namespaces: some machines have a public address, others are behind routers.

Its addresses look public, since libp2p ignores private and documentation ranges. There is no route to anywhere else.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum

from tests.swarm.networks import Namespaces, NetworkError, inside, run

TOOLS = ("ip", "iptables", "ip6tables")
ESTABLISHED = ("-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT")
FORWARDING = ("net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding")


class Kind(StrEnum):
    """How a machine is connected to the internet."""

    OPEN = "open"
    """By an IPv4 and an IPv6 address of its own, which anybody can dial."""
    CONE = "cone"
    """Behind a NAT that keeps port numbers, so that hole punching can work."""
    SYMMETRIC = "symmetric"
    """Behind a NAT that maps each connection to a port drawn at random."""
    CGNAT = "cgnat"
    """Behind two NATs in a row: one that keeps port numbers, and the carrier's, which does not."""
    WEB = "web"
    """Behind a NAT that lets out only TCP connections to ports 80 and 443."""
    IPV6 = "ipv6"
    """By IPv6 only, behind a firewall that lets in only what was asked for."""


@dataclass(frozen=True)
class Machine:
    """A machine of the internet.

    `address` is its own, `public_address` the one that others see: its router's, if it is behind one. The other end of
    its cable is `device` in the namespace `outer`.
    """

    namespace: str
    kind: Kind
    address: str
    address6: str
    public_address: str
    outer: str
    device: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What goes before a command so that it runs there."""
        return inside(self.namespace)


class Internet:
    """Machines around a core that forwards between their networks. Made by `internet`."""

    def __init__(self, stack: ExitStack) -> None:
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            raise NetworkError(f"{', '.join(missing)}: not installed")
        self._namespaces = Namespaces(stack)
        self._customers = 0
        self._core = self._namespaces.add("core")
        _forward(self._core)
        _try_all(self._core)

    def machine(self, kind: Kind) -> Machine:
        """Add a machine that is connected this way."""
        return self._connect(self._namespaces.add(f"{kind}{self._customers + 1}"), kind)

    def move(self, machine: Machine, kind: Kind) -> Machine:
        """Carry a running machine to another network: new addresses, another router. Nobody is told."""
        run("ip", "-n", machine.namespace, "link", "delete", "eth0")
        return self._connect(machine.namespace, kind)

    def unplug(self, machine: Machine) -> None:
        """Lose all that is sent to the machine, and from it, from now on. Nobody is told."""
        self._switch(machine, "down")

    def plug(self, machine: Machine) -> None:
        """End what `unplug` began."""
        self._switch(machine, "up")

    def _switch(self, machine: Machine, state: str) -> None:
        run("ip", "-n", machine.outer, "link", "set", machine.device, state)

    def suspend(self, machine: Machine) -> None:
        """Stop all processes of a machine, as closing its lid does."""
        self._signal(machine, signal.SIGSTOP)

    def wake(self, machine: Machine) -> None:
        self._signal(machine, signal.SIGCONT)

    def _signal(self, machine: Machine, number: signal.Signals) -> None:
        for process in run("ip", "netns", "pids", machine.namespace).split():
            with suppress(ProcessLookupError):
                os.kill(int(process), number)

    def _connect(self, namespace: str, kind: Kind) -> Machine:
        self._customers += 1
        number = self._customers
        network, network6 = f"11.77.{number}", f"2a0e:77:{number}:"
        if kind is Kind.OPEN:
            _cable(self._core, f"to{number}", namespace, network, network6)
            return Machine(namespace, kind, f"{network}.2", f"{network6}:2", f"{network}.2", self._core, f"to{number}")
        router = self._namespaces.add(f"router{number}")
        _cable(self._core, f"to{number}", router, network, network6)
        _forward(router)
        if kind is Kind.IPV6:
            home6 = f"2a0e:77:{number}:1:"
            _cable(router, "lan", namespace, "", home6)
            run("ip", "-n", self._core, "route", "add", f"{home6}:/64", "via", f"{network6}:2")
            _let_in_only_answers(router, "ip6tables")
            return Machine(namespace, kind, "", f"{home6}:2", "", router, "lan")
        home = f"192.168.{number}"
        if kind is Kind.CGNAT:
            carrier, router = router, self._namespaces.add(f"home{number}")
            _translate(carrier, Kind.SYMMETRIC)
            _cable(carrier, "lan", router, f"100.64.{number}", "")
            _forward(router)
        _translate(router, Kind.CONE if kind is Kind.CGNAT else kind)
        _cable(router, "lan", namespace, home, "")
        return Machine(namespace, kind, f"{home}.2", "", f"{network}.2", router, "lan")


@contextmanager
def internet() -> Iterator[Internet]:
    """An internet without machines, of which nothing is left. Raises: NetworkError."""
    with ExitStack() as stack:
        yield Internet(stack)


def _cable(outer: str, device: str, inner: str, network: str, network6: str) -> None:
    """Connect `inner` to `outer`, which becomes its way to everywhere. Without a network, that version of IP is off."""
    run("ip", "-n", outer, "link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", inner)
    for namespace, name, host in ((outer, device, 1), (inner, "eth0", 2)):
        run("ip", "-n", namespace, "link", "set", name, "up")
        if network:
            run("ip", "-n", namespace, "address", "add", f"{network}.{host}/24", "dev", name)
        if network6:
            run("ip", "-n", namespace, "address", "add", f"{network6}:{host}/64", "dev", name, "nodad")
    if network:
        run("ip", "-n", inner, "route", "add", "default", "via", f"{network}.1")
    if network6:
        run("ip", "-n", inner, "route", "add", "default", "via", f"{network6}:1")


def _try_all(namespace: str) -> None:
    """Find out what the kernel lacks before a test is under way. The rules are about a device that is not there."""
    run("ip", "-n", namespace, "address", "add", "2a0e:77::1/128", "dev", "lo")
    for kind in (Kind.SYMMETRIC, Kind.WEB):
        _translate(namespace, kind)
    _let_in_only_answers(namespace, "ip6tables")


def _forward(namespace: str) -> None:
    """Pass on what is for others."""
    for name in FORWARDING:
        run(*inside(namespace), "sh", "-c", f"echo 1 > /proc/sys/{name}")


def _translate(router: str, kind: Kind) -> None:
    """Have what leaves the router come from its own address, and let in only the answers."""
    mapping = ("--random-fully",) if kind is Kind.SYMMETRIC else ()
    _rule(router, "iptables", "-t", "nat", "-A", "POSTROUTING", "-o", "eth0", "-j", "MASQUERADE", *mapping)
    _let_in_only_answers(router, "iptables")
    if kind is Kind.WEB:
        web = ("-p", "tcp", "-m", "multiport", "--dports", "80,443")
        _rule(router, "iptables", "-A", "FORWARD", "-o", "eth0", *web, "-j", "ACCEPT")
        _rule(router, "iptables", "-A", "FORWARD", "-o", "eth0", "-j", "DROP")


def _let_in_only_answers(router: str, tool: str) -> None:
    for chain in ("FORWARD", "INPUT"):
        _rule(router, tool, "-A", chain, "-i", "eth0", *ESTABLISHED)
        if tool == "ip6tables":  # without neighbour discovery nobody finds the router itself
            _rule(router, tool, "-A", chain, "-i", "eth0", "-p", "ipv6-icmp", "-j", "ACCEPT")
        _rule(router, tool, "-A", chain, "-i", "eth0", "-j", "DROP")


def _rule(namespace: str, tool: str, *arguments: str) -> None:
    run(*inside(namespace), tool, "--wait", *arguments)
