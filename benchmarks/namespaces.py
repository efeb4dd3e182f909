"""Network namespaces for the peers of a benchmark, and the rates that iperf3 gets through the links between them.

A benchmark uses existing namespaces: each has one IPv4 address beside the loopback's, and links of any shape join them.
docs/benchmarks.md shows one way to make some.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import click

from benchmarks.groups import Place

IPERF_SECONDS, IPERF_WARM_UP = 5, 2
IPERF_PORT = 5201
IPERF_STREAMS = 8
IDLE_BITS = "64K"
"""Bits a second while the round trip is measured, so few that they do not queue."""

Pair = tuple[str, str]
"""The sending namespace and the receiving one."""


@dataclass(frozen=True)
class LinkRates:
    """Bytes a second that each namespace's link carries in either direction."""

    up: tuple[float, ...]
    down: tuple[float, ...]

    @classmethod
    def of_flows(cls, namespaces: Sequence[str], flows: dict[Pair, float]) -> LinkRates:
        """Return the sums of the flows that each namespace sends and receives."""
        up = [sum(rate for (sender, _), rate in flows.items() if sender == one) for one in namespaces]
        down = [sum(rate for (_, receiver), rate in flows.items() if receiver == one) for one in namespaces]
        return cls(tuple(up), tuple(down))

    @property
    def both_ways(self) -> list[float]:
        """The rate of each link in its slower direction."""
        return list(map(min, self.up, self.down))


def place_in(namespace: str) -> Place:
    """Return the place of a peer in a namespace. Raises: ClickException when it has no IPv4 address beside the
    loopback's."""
    for interface in json.loads(_output("ip", "-n", namespace, "-json", "addr")):
        for address in interface["addr_info"]:
            if address["family"] == "inet" and address["scope"] != "host":
                return Place(_inside(namespace), str(address["local"]), str(interface["ifname"]))
    raise click.ClickException(f"the network namespace {namespace} has no IPv4 address")


def has_iperf3() -> bool:
    """Return True if iperf3 is installed; otherwise print that links cannot be measured."""
    if shutil.which("iperf3") is None:
        click.echo("iperf3 is not installed: what the links carry is not measured", err=True)
        return False
    return True


def rates_alone(namespaces: Sequence[str], streams: int) -> LinkRates:
    """Return the rate of each link, measured one link and one direction at a time. All other namespaces send to it, or
    receive from it."""
    up = [sum(flows([pair for pair in _pairs(namespaces) if pair[0] == one], streams).values()) for one in namespaces]
    if len(namespaces) == 2:
        return LinkRates(tuple(up), tuple(reversed(up)))
    down = [converging([other for other in namespaces if other != one], one, streams) for one in namespaces]
    return LinkRates(tuple(up), tuple(down))


def rates_at_once(namespaces: Sequence[str], streams: int) -> LinkRates:
    """Return the rates of the links while all peers send to all others, as in a round. A shared medium may carry less
    than the links together."""
    return LinkRates.of_flows(namespaces, flows(_pairs(namespaces), streams))


def converging(senders: Sequence[str], receiver: str, streams: int) -> float:
    """Return the bytes a second that several namespaces send to a single namespace at the same time."""
    return sum(flows([(sender, receiver) for sender in senders], streams).values())


def flows(pairs: Sequence[Pair], streams: int) -> dict[Pair, float]:
    """Return the bytes a second of each pair, all at the same time, over this many TCP connections each, after a
    warm-up."""
    ports = range(IPERF_PORT, IPERF_PORT + len(pairs))
    arguments = ["--parallel", streams, "--time", IPERF_SECONDS, "--omit", IPERF_WARM_UP]
    with ThreadPoolExecutor(len(pairs)) as pool:
        ends = pool.map(lambda pair, port: _iperf(pair, port, *arguments), pairs, ports)
        return {pair: end["sum_received"]["bits_per_second"] / 8 for pair, end in zip(pairs, ends, strict=True)}


def round_trip(pair: Pair) -> float:
    """Return the seconds of a round trip over an idle link."""
    end = _iperf(pair, IPERF_PORT, "--time", 1, "--bitrate", IDLE_BITS, "--length", 1000)
    return float(end["streams"][0]["sender"]["min_rtt"]) / 1e6


def _pairs(namespaces: Sequence[str]) -> list[Pair]:
    return list(permutations(namespaces, 2))


def _iperf(pair: Pair, port: int, *arguments: object) -> dict[str, Any]:
    """Return the final part of iperf3's report on one pair."""
    sender, receiver = pair
    at_port = ["--port", str(port)]
    server = subprocess.Popen(
        [*_inside(receiver), "iperf3", "--server", "--one-off", "--forceflush", *at_port],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        if not any("listening" in line for line in server.stdout):
            raise click.ClickException(f"iperf3 cannot listen in the network namespace {receiver}")
        client = [*_inside(sender), "iperf3", "--client", place_in(receiver).address, *at_port, "--json"]
        report: dict[str, dict[str, Any]] = json.loads(_output(*client, *map(str, arguments)))
        return report["end"]
    finally:
        server.kill()
        server.wait()


def _inside(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace)


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise click.ClickException(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
