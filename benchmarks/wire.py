"""The traffic on the peers' links in the course of one averaging round: `python -m benchmarks.wire --namespaces a,b`.

Our peers and gloo's take turns in network namespaces that links of any shape join, and move the same number of bytes.
Meanwhile the counters of each namespace's interface are read every few milliseconds. For each contender's median round:

- "first byte s": from the start signal to all peers until the first peer sends data. Our peers make their blocks
  first ("encode s").
- "after last s": from the last data that arrives anywhere until all peers have the average and, for ours, know that
  all have it.
- "used over 80 %": the share of the time until then in which a link carried more than 0.8 of the rate that iperf3
  gets through all links at once; the mean over the peers.

The bar is on the messages around the exchange, in one-way delays of the links. The time before the first byte without
making the blocks (Ready; the leader sends blocks with its Begin) and the time after the last one (Part, Propose, Vote
1, Vote 2) may take five of them together. --svg draws the two rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.groups import GLOO_BYTES, OURS, Group, measure
from benchmarks.namespaces import IPERF_STREAMS, LinkRates, has_iperf3, place_in, rates_at_once, round_trip
from benchmarks.plots import Panel, Point, svg
from benchmarks.reporting import Bar, json_option, report

PERIOD = 0.004  # seconds between two reads of the interfaces' byte counters
WINDOW = 0.02  # seconds over which a transfer rate is averaged
WELL_USED = 0.8
CONTROL_BYTES = 1 << 15  # bytes of a few control messages; more traffic contains data
DELAYS = 5.0


@dataclass
class Wire:
    """The bytes that one network interface has received and sent, at times in seconds of the clock that all processes
    share."""

    times: list[float] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def add(self, at: float, received: int, sent: int) -> None:
        self.times.append(at)
        self.received.append(received)
        self.sent.append(sent)

    def first_sent(self, start: float) -> float:
        """Return the time, in seconds, of the first data sent after `start`. The first CONTROL_BYTES bytes after
        `start` count as control messages, not as data."""
        return self._reaches(self.sent, _at(self.times, self.sent, start) + CONTROL_BYTES)

    def last_received(self, end: float) -> float:
        """Return the time, in seconds, of the last data received before `end`. The last CONTROL_BYTES bytes before
        `end` count as control messages, not as data."""
        return self._reaches(self.received, _at(self.times, self.received, end) - CONTROL_BYTES)

    def rates(self, start: float, end: float) -> list[Point]:
        """Return a pair for each window of WINDOW seconds: the window's end, in seconds after `start`, and the bytes a
        second that the interface received in the window."""
        bounds = [start + WINDOW * number for number in range(int((end - start) / WINDOW) + 1)]
        counts = [_at(self.times, self.received, bound) for bound in bounds]
        pairs = zip(bounds[1:], counts, counts[1:], strict=False)
        return [(bound - start, (after - before) / WINDOW) for bound, before, after in pairs]

    def _reaches(self, counts: Sequence[int], count: float) -> float:
        return self.times[min(bisect_left(counts, count), len(counts) - 1)]


def _at(times: Sequence[float], counts: Sequence[int], at: float) -> float:
    """Return an interface's byte count at the time `at`, interpolated between the nearest two reads."""
    place = bisect_left(times, at)
    if place in (0, len(times)):
        return counts[min(place, len(times) - 1)]
    part = (at - times[place - 1]) / (times[place] - times[place - 1])
    return counts[place - 1] + part * (counts[place] - counts[place - 1])


class InterfaceCounters:
    """A thread that reads the byte counters of the peers' network interfaces every few milliseconds."""

    def __init__(self, stack: ExitStack, namespaces: Sequence[str]) -> None:
        """Start the thread, which ends when `stack` closes."""
        self.wires = [Wire() for _ in namespaces]
        places = [place_in(namespace) for namespace in namespaces]
        inside = [stack.enter_context(process_behind(place.prefix)) for place in places]
        self._interfaces = [
            (Path(f"/proc/{process}/net/dev"), f"{place.interface}:")
            for process, place in zip(inside, places, strict=True)
        ]
        self._ended = threading.Event()
        thread = threading.Thread(target=self._read)
        thread.start()
        stack.callback(thread.join)
        stack.callback(self._ended.set)

    def _read(self) -> None:
        while not self._ended.wait(PERIOD):
            for wire, (file, interface) in zip(self.wires, self._interfaces, strict=True):
                words = file.read_text(encoding="ascii").partition(interface)[2].split()
                wire.add(time.monotonic(), int(words[0]), int(words[8]))


@contextmanager
def process_behind(prefix: Sequence[str]) -> Iterator[int]:
    """Start an idle process in a network namespace, and yield its process id. The process's folder in /proc shows the
    namespace's byte counters."""
    with subprocess.Popen([*prefix, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("is it there?\n")
        process.stdin.flush()
        if not process.stdout.readline():
            raise click.ClickException(f"{' '.join(prefix)} cannot run anything")
        yield process.pid


@dataclass(frozen=True)
class RoundTraffic:
    """The traffic of one round: the seconds of its parts, and the rates at which each peer received bytes."""

    seconds: float
    encoding: float
    first_byte: float
    after_last: float
    well_used: float
    lines: Sequence[Sequence[Point]]

    @property
    def talking(self) -> float:
        """The seconds of a round before its first data is sent and after its last data is received, minus the seconds
        of encoding, and at least PERIOD."""
        return max(PERIOD, self.first_byte - self.encoding + self.after_last)


def traffic_of(group: Group, number: int, wires: Sequence[Wire], rates: LinkRates) -> RoundTraffic:
    """Return the traffic of a group's round `number`, from the byte counts in `wires`. The round ends when all peers
    have the average."""
    began, reports = group.began[number], group.rounds[number]
    ended = max(report.get("agreed") or report["time"] for report in reports)
    lines = [wire.rates(began, ended) for wire in wires]
    used = [
        sum(rate >= WELL_USED * down for _, rate in line) / max(1, len(line))
        for line, down in zip(lines, rates.down, strict=True)
    ]
    return RoundTraffic(
        seconds=ended - began,
        encoding=max(report.get("encoded", began) for report in reports) - began,
        first_byte=min(wire.first_sent(began) for wire in wires) - began,
        after_last=ended - max(wire.last_received(ended) for wire in wires),
        well_used=statistics.mean(used),
        lines=lines,
    )


def median_traffic(measured: Sequence[RoundTraffic]) -> RoundTraffic:
    return sorted(measured, key=lambda traffic: traffic.seconds)[len(measured) // 2]


def row_of(name: str, traffic: RoundTraffic, delay: float) -> dict[str, Any]:
    """Return the table's row on one contender's median round. `delay` is the links' one-way delay in seconds."""
    return {
        "contender": name,
        "peers": len(traffic.lines),
        "seconds": traffic.seconds,
        "encode s": traffic.encoding,
        "first byte s": traffic.first_byte,
        "after last s": traffic.after_last,
        "one way ms": delay * 1e3,
        "delays beside": traffic.talking / delay,
        "used over 80 %": traffic.well_used,
    }


def panel_of(name: str, traffic: RoundTraffic, rates: LinkRates) -> Panel:
    megabit = 8 / 1e6
    lines = {
        f"into peer {number}": [(at, rate * megabit) for at, rate in line]
        for number, line in enumerate(traffic.lines, start=1)
    }
    moments = {"first byte": traffic.first_byte, "last byte": traffic.seconds - traffic.after_last}
    return Panel(
        f"{name}: {traffic.seconds:.2f} s; Mbit/s received",
        lines,
        ("iperf3, all at once", min(rates.down) * megabit),
        moments,
    )


def measure_traffic(
    values: int, namespaces: Sequence[str], repetitions: int, rates: LinkRates
) -> dict[str, RoundTraffic]:
    """Run rounds of diloco-peer and of gloo, and return the traffic of each library's round of median duration, by
    name."""
    with ExitStack() as stack:
        watch = InterfaceCounters(stack, namespaces)
        groups = asyncio.run(measure([OURS, GLOO_BYTES], values, list(map(place_in, namespaces)), repetitions))
    return {
        name: median_traffic([traffic_of(group, number, watch.wires, rates) for number in range(repetitions)])
        for name, group in groups.items()
    }


@click.command(help=__doc__)
@click.option("--namespaces", required=True, help="Network namespaces, two or more, joined by links. Needs root.")
@click.option("--values", default=20_000_000, show_default=True, help="fp32 values to average.")
@click.option("--repetitions", default=3, show_default=True, help="Rounds of each contender.")
@click.option("--iperf-streams", default=IPERF_STREAMS, show_default=True, help="Connections between each two.")
@click.option("--svg", "svg_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw the rounds here.")
@json_option
def main(
    namespaces: str,
    values: int,
    repetitions: int,
    iperf_streams: int,
    svg_file: Path | None,
    json_file: Path | None,
) -> None:
    if not has_iperf3():
        return
    names = namespaces.split(",")
    rates, delay = rates_at_once(names, iperf_streams), round_trip((names[0], names[1])) / 2
    measured = measure_traffic(values, names, repetitions, rates)
    rows = [row_of(name, traffic, delay) for name, traffic in measured.items()]
    allowed = DELAYS * delay / measured[OURS].talking
    bars = [Bar(f"{DELAYS:g} one-way delays / ours beside bytes and arithmetic", allowed, 1.0)]
    if svg_file:
        panels = [panel_of(name, traffic, rates) for name, traffic in measured.items()]
        plot = svg(panels, "seconds after go")
        svg_file.write_text(plot, encoding="utf-8")
    report(
        f"bytes on the wire: {values / 1e6:g} M fp32 values, the median of {repetitions} rounds", rows, bars, json_file
    )


if __name__ == "__main__":
    main()
