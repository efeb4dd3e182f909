"""Where processes live: all on the loopback interface, or each in a network namespace, with a cable that can be cut."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

SWITCH = "switch"


class NetworkError(Exception):
    """This machine, or this user, cannot have such a network."""


@dataclass(frozen=True)
class Place:
    """Where a process listens, and what goes before its command so that it runs there."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    port: str = ""  # of the switch

    @property
    def listen(self) -> str:
        return f"/ip4/{self.address}/tcp/0"


class Namespaces:
    """Network namespaces with names of their own. They are deleted when the stack is closed."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._name = f"diloco-peer-{uuid.uuid4().hex[:8]}"

    def add(self, label: str) -> str:
        """Create a namespace; returns its name."""
        name = f"{self._name}-{label}"
        run("ip", "netns", "add", name)
        self._stack.callback(run, "ip", "netns", "delete", name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        return name


class Network:
    """Namespaces around a switch, which has one of its own: nothing is seen from outside, and no address taken."""

    def __init__(self, places: int, stack: ExitStack) -> None:
        self._namespaces = Namespaces(stack)
        self._switch = self._namespaces.add(SWITCH)
        self._ip("link", "add", SWITCH, "type", "bridge")
        self._ip("link", "set", SWITCH, "up")
        self.places = [self._add_place(number) for number in range(1, places + 1)]

    def _add_place(self, number: int) -> Place:
        namespace = self._namespaces.add(str(number))
        place = Place(f"10.0.0.{number}", inside(namespace), f"port{number}")
        self._ip("link", "add", place.port, "type", "veth", "peer", "name", "cable", "netns", namespace)
        self._ip("link", "set", place.port, "master", SWITCH, "up")
        run("ip", "-n", namespace, "address", "add", f"{place.address}/24", "dev", "cable")
        run("ip", "-n", namespace, "link", "set", "cable", "up")
        return place

    def cut(self, place: Place) -> None:
        """What is sent there, or from there, is lost from now on, and nobody is told."""
        self._ip("link", "set", place.port, "down")

    def mend(self, place: Place) -> None:
        self._ip("link", "set", place.port, "up")

    def slow_down(self, place: Place, megabits: int) -> None:
        """No more than so many megabits a second arrive there from now on."""
        limit = ("rate", f"{megabits}mbit", "burst", "32kb", "latency", "200ms")
        run("tc", "-n", self._switch, "qdisc", "add", "dev", place.port, "root", "tbf", *limit)

    def _ip(self, *arguments: str) -> None:
        """In the namespace of the switch."""
        run("ip", "-n", self._switch, *arguments)


@contextmanager
def network(places: int) -> Iterator[Network]:
    """So many places, of which nothing is left. Raises: NetworkError."""
    with ExitStack() as stack:
        yield Network(places, stack)


def inside(namespace: str) -> tuple[str, ...]:
    """What goes before a command that is to run in a namespace."""
    return ("ip", "netns", "exec", namespace)


def run(*command: str) -> str:
    """Run a command of the system's; returns what it printed. Raises: NetworkError when it fails or is missing."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise NetworkError(f"{command[0]} is not installed") from None
    except subprocess.CalledProcessError as error:
        raise NetworkError(f"{' '.join(command)}: {error.stderr.strip()}") from error
