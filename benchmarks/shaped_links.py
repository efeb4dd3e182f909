"""A round of ours between network namespaces, beside what their links allow; part of benchmarks/averaging.py.

The namespaces are there already, each with one address, joined by whatever shapes links. What a link carries is
measured by iperf3 in the same run: nobody can average faster than every peer sends 2 (n - 1) / n payloads.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from benchmarks.groups import OURS, Group, Place, measure, sent_bytes
from benchmarks.reporting import Bar, report
from opendiloco.kernels import INT8

IPERF_SECONDS, IPERF_WARM_UP = 5, 2
IPERF_PORT = 5201


def address_of(namespace: str) -> str:
    """Its first IPv4 address that is not the loopback's."""
    interfaces = json.loads(_output("ip", "-n", namespace, "-json", "addr"))
    for interface in interfaces:
        for address in interface["addr_info"]:
            if address["family"] == "inet" and address["scope"] != "host":
                return str(address["local"])
    raise click.ClickException(f"the network namespace {namespace} has no IPv4 address")


def place_in(namespace: str) -> Place:
    """Where one of our peers runs in it."""
    return Place(("ip", "netns", "exec", namespace), ("--listen", f"/ip4/{address_of(namespace)}/tcp/0"))


def link_bytes_per_second(sender: str, receiver: str, port: int = IPERF_PORT) -> float:
    """What iperf3 gets from one namespace to another over one TCP connection, once it is up to speed."""
    at_port = ["--port", str(port)]
    server = subprocess.Popen(
        ["ip", "netns", "exec", receiver, "iperf3", "--server", "--one-off", "--forceflush", *at_port],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        if not any("listening" in line for line in server.stdout):
            raise click.ClickException(f"iperf3 cannot listen in the network namespace {receiver}")
        seconds = ["--time", str(IPERF_SECONDS), "--omit", str(IPERF_WARM_UP)]
        client = ["ip", "netns", "exec", sender, "iperf3", "--client", address_of(receiver), *at_port, *seconds]
        return float(json.loads(_output(*client, "--json"))["end"]["sum_received"]["bits_per_second"]) / 8
    finally:
        server.kill()
        server.wait()


def slowest_link(namespaces: Sequence[str]) -> float:
    """Bytes a second of the slowest of the links from each namespace to the next."""
    following = [*namespaces[1:], namespaces[0]]
    return min(link_bytes_per_second(sender, receiver) for sender, receiver in zip(namespaces, following, strict=True))


def converging_bytes_per_second(senders: Sequence[str], receiver: str) -> float:
    """What iperf3 gets from all these namespaces at once to another."""
    ports = range(IPERF_PORT, IPERF_PORT + len(senders))
    with ThreadPoolExecutor(len(senders)) as pool:
        return sum(pool.map(link_bytes_per_second, senders, [receiver] * len(senders), ports))


def sent_all_at_once(namespaces: Sequence[str]) -> float:
    """Bytes a second that the slowest of them sends while iperf3 goes from each to each other: what the machine that
    carries all these links has to give, as a round asks for it."""
    pairs = [(sender, receiver) for sender in namespaces for receiver in namespaces if sender != receiver]
    ports = range(IPERF_PORT, IPERF_PORT + len(pairs))
    with ThreadPoolExecutor(len(pairs)) as pool:
        rates = list(pool.map(link_bytes_per_second, *zip(*pairs, strict=True), ports))
    return min(sum(rate for (sender, _), rate in zip(pairs, rates, strict=True) if sender == one) for one in namespaces)


def row_of(group: Group, payload: int, link: float, at_once: float) -> dict[str, Any]:
    """One line of the table. The bound is of links that carry nothing else, which they don't do on one machine."""
    peers, seconds = len(group.peers), statistics.median(group.seconds)
    bound = sent_bytes(payload, peers) / link
    return {
        "contender": OURS,
        "peers": peers,
        "seconds": seconds,
        "exchange s": group.exchange_seconds,
        "payload MB": payload / 1e6,
        "sent MB": sent_bytes(payload, peers) / 1e6,
        "link Mbit/s": link * 8 / 1e6,
        "bound s": bound,
        "of the bound": bound / seconds,
        "all at once Mbit/s": at_once * 8 / 1e6,
        "of that": sent_bytes(payload, peers) / at_once / seconds,
    }


def run(values: int, namespaces: Sequence[str], repetitions: int, json_file: Path | None) -> None:
    """Measure and report; does nothing where iperf3 is missing."""
    if shutil.which("iperf3") is None:
        click.echo("iperf3 is not installed: nothing to compare a round on these links with, so it is not measured")
        return
    link, at_once = slowest_link(namespaces), sent_all_at_once(namespaces)
    places = list(map(place_in, namespaces))
    groups = asyncio.run(measure([OURS], values, places, repetitions))
    row = row_of(groups[OURS], INT8.payload_size(values), link, at_once)
    bars = [Bar(f"bound / ours, {len(namespaces)} peers", row["of the bound"], 0.85)]
    report(
        f"averaging {values / 1e6:g} M fp32 values over shaped links, median of {repetitions}", [row], bars, json_file
    )


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise click.ClickException(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
