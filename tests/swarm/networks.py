"""Where processes live: all on the loopback interface, or each in a network namespace, with a cable that can be cut."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

SWITCH = "switch"


class NetworkError(Exception):
    """This machine, or this user, cannot have namespaces."""


@dataclass(frozen=True)
class Place:
    """Where a process listens, and what goes before its command so that it runs there."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    port: str = ""  # of the switch

    @property
    def listen(self) -> str:
        return f"/ip4/{self.address}/tcp/0"


class Network:
    """Namespaces around a switch, which has one of its own: nothing is seen from outside, and no address taken."""

    def __init__(self, places: int, stack: ExitStack) -> None:
        self._stack = stack
        self._name = f"diloco-peer-{uuid.uuid4().hex[:8]}"
        self._add_namespace(self._name)
        self._ip("link", "add", SWITCH, "type", "bridge")
        self._ip("link", "set", SWITCH, "up")
        self.places = [self._add_place(number) for number in range(1, places + 1)]

    def _add_place(self, number: int) -> Place:
        namespace = f"{self._name}-{number}"
        self._add_namespace(namespace)
        place = Place(f"10.0.0.{number}", ("ip", "netns", "exec", namespace), f"port{number}")
        self._ip("link", "add", place.port, "type", "veth", "peer", "name", "cable", "netns", namespace)
        self._ip("link", "set", place.port, "master", SWITCH, "up")
        _ip("-n", namespace, "address", "add", f"{place.address}/24", "dev", "cable")
        _ip("-n", namespace, "link", "set", "cable", "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        return place

    def cut(self, place: Place) -> None:
        """What is sent there, or from there, is lost from now on, and nobody is told."""
        self._ip("link", "set", place.port, "down")

    def mend(self, place: Place) -> None:
        self._ip("link", "set", place.port, "up")

    def _add_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self._stack.callback(_ip, "netns", "delete", name)

    def _ip(self, *arguments: str) -> None:
        """In the namespace of the switch."""
        _ip("-n", self._name, *arguments)


@contextmanager
def network(places: int) -> Iterator[Network]:
    """So many places, of which nothing is left. Raises: NetworkError."""
    with ExitStack() as stack:
        yield Network(places, stack)


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise NetworkError("iproute2 is not installed") from None
    except subprocess.CalledProcessError as error:
        raise NetworkError(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from error
