"""Network namespaces for a benchmark's peers, and the speeds that iperf3 measures on the links between the namespaces.

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
    """The speeds of the namespaces' links in bytes a second: `up` from each namespace, and `down` to each namespace."""

    up: tuple[float, ...]
    down: tuple[float, ...]

    @classmethod
    def of_flows(cls, namespaces: Sequence[str], flows: dict[Pair, float]) -> LinkRates:
        """Return the rates of each namespace's link: `up` is the sum of all flows from the namespace, and `down` the
        sum of all flows to the namespace."""
        up = [sum(rate for (sender, _), rate in flows.items() if sender == one) for one in namespaces]
        down = [sum(rate for (_, receiver), rate in flows.items() if receiver == one) for one in namespaces]
        return cls(tuple(up), tuple(down))

    @property
    def both_ways(self) -> list[float]:
        """The speed of each link in its slower direction, in bytes a second."""
        return list(map(min, self.up, self.down))


def place_in(namespace: str) -> Place:
    """Return the command that runs a process in a network namespace, the namespace's first IPv4 address, and its
    interface, as a Place. Raises: ClickException if it has no IPv4 address except the loopback's."""
    for interface in json.loads(_output("ip", "-n", namespace, "-json", "addr")):
        for address in interface["addr_info"]:
            if address["family"] == "inet" and address["scope"] != "host":
                return Place(_inside(namespace), str(address["local"]), str(interface["ifname"]))
    raise click.ClickException(f"the network namespace {namespace} has no IPv4 address")


def has_iperf3() -> bool:
    """Return True if iperf3 is installed. Otherwise print that the links are not measured, and return False."""
    if shutil.which("iperf3") is None:
        click.echo("iperf3 is not installed: what the links carry is not measured", err=True)
        return False
    return True


def rates_alone(namespaces: Sequence[str], streams: int) -> LinkRates:
    """Return the speeds of each namespace's link, each measured alone: `up` while only the link's namespace
    sends, to all others, and `down` while only this namespace receives, from all others."""
    up = [sum(flows([pair for pair in _pairs(namespaces) if pair[0] == one], streams).values()) for one in namespaces]
    if len(namespaces) == 2:
        return LinkRates(tuple(up), tuple(reversed(up)))
    down = [converging([other for other in namespaces if other != one], one, streams) for one in namespaces]
    return LinkRates(tuple(up), tuple(down))


def rates_at_once(namespaces: Sequence[str], streams: int) -> LinkRates:
    """Return the speed of each namespace's link while all namespaces send to all others, as in a round. Links that
    share a medium may be slower together than alone."""
    return LinkRates.of_flows(namespaces, flows(_pairs(namespaces), streams))


def converging(senders: Sequence[str], receiver: str, streams: int) -> float:
    """Return the bytes a second that `receiver` gets in all while all `senders` send at the same time."""
    return sum(flows([(sender, receiver) for sender in senders], streams).values())


def flows(pairs: Sequence[Pair], streams: int) -> dict[Pair, float]:
    """Return the bytes a second of each pair of namespaces, measured on all pairs at the same time with `streams` TCP
    connections each, after a warm-up."""
    ports = range(IPERF_PORT, IPERF_PORT + len(pairs))
    arguments = ["--parallel", streams, "--time", IPERF_SECONDS, "--omit", IPERF_WARM_UP]
    with ThreadPoolExecutor(len(pairs)) as pool:
        ends = pool.map(lambda pair, port: _iperf(pair, port, *arguments), pairs, ports)
        return {pair: end["sum_received"]["bits_per_second"] / 8 for pair, end in zip(pairs, ends, strict=True)}


def round_trip(pair: Pair) -> float:
    """Return the seconds of a round trip between two namespaces over an idle link."""
    end = _iperf(pair, IPERF_PORT, "--time", 1, "--bitrate", IDLE_BITS, "--length", 1000)
    return float(end["streams"][0]["sender"]["min_rtt"]) / 1e6


def _pairs(namespaces: Sequence[str]) -> list[Pair]:
    return list(permutations(namespaces, 2))


def _iperf(pair: Pair, port: int, *arguments: object) -> dict[str, Any]:
    """Run iperf3 between the two namespaces of a pair, and return the "end" section of its report."""
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
