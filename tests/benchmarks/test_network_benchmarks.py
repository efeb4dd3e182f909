"""Benchmarks between network namespaces: they run where there can be some, and calculate what they should."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from benchmarks import averaging, namespaces, utilisation, wire
from benchmarks.groups import CONTENDERS, GLOO_BYTES, OURS, Group, Place
from benchmarks.namespaces import LinkRates
from benchmarks.plots import Panel, svg
from benchmarks.shaped_links import Possible, bars_of, least_seconds
from benchmarks.wire import RoundTraffic, Wire
from opendiloco.tools.plan import PeerGroup
from tests.child_processes import child_processes
from tests.swarm.networks import NetworkError, network

MEGABITS = 20
"""What a link of `two_namespaces` carries in a second. A round should take much longer than the thread that reads the
counters may wait for a processor: without a limit 2 MB pass within one of its periods, and are seen too late."""


@pytest.fixture
def two_namespaces(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Two that a switch joins, as --namespaces has them."""
    if shutil.which("iperf3") is None:
        pytest.skip("iperf3 is not installed")
    monkeypatch.setattr(namespaces, "IPERF_SECONDS", 1)
    monkeypatch.setattr(namespaces, "IPERF_WARM_UP", 0)
    try:
        with network(2) as made:
            for place in made.places:
                made.slow_down(place, MEGABITS)
            yield ",".join(place.prefix[-1] for place in made.places)
    except NetworkError as error:
        pytest.skip(f"no network namespaces: {error}")


@pytest.mark.thorough
@pytest.mark.swarm
def test_averaging_reports_on_links(two_namespaces: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ["--values", "50000", "--repetitions", "1", "--namespaces", two_namespaces, "--iperf-streams", "2"]
    done = CliRunner().invoke(averaging.main, [*arguments, "--json", str(figures)], catch_exceptions=False)
    assert done.output.strip().splitlines()[-1].startswith("verdict: ")
    content = json.loads(figures.read_text())
    rows = {row["contender"]: row for row in content["rows"]}
    assert set(rows) == {OURS, GLOO_BYTES}
    assert rows[OURS]["payload MB"] == pytest.approx(rows[GLOO_BYTES]["payload MB"])
    assert all(row["bound s"] > 0 and row["of what is possible"] > 0 for row in rows.values())
    assert [bar["name"] for bar in content["bars"]] == [
        "what iperf3 -P 2 allows / ours, 2 peers",
        "gloo, as many bytes / ours, 2 peers",
    ]
    assert not child_processes()


@pytest.mark.thorough
@pytest.mark.swarm
def test_the_wire_is_drawn(two_namespaces: str, tmp_path: Path) -> None:
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.svg"
    arguments = ["--values", "2000000", "--repetitions", "1", "--namespaces", two_namespaces, "--iperf-streams", "1"]
    arguments += ["--json", str(figures), "--svg", str(plot)]
    done = CliRunner().invoke(wire.main, arguments, catch_exceptions=False)
    assert done.output.strip().splitlines()[-1].startswith("verdict: ")
    rows = {row["contender"]: row for row in json.loads(figures.read_text())["rows"]}
    assert set(rows) == {OURS, GLOO_BYTES}
    assert all(0 < row["first byte s"] < row["seconds"] for row in rows.values())
    assert rows[OURS]["encode s"] > rows[GLOO_BYTES]["encode s"] == 0
    lines = ElementTree.fromstring(plot.read_text()).findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4
    assert not child_processes()


@pytest.mark.thorough
@pytest.mark.swarm
def test_utilisation_reports_beside_the_plan(
    two_namespaces: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_, last = utilisation.methods_for(2, 1)
    monkeypatch.setattr(utilisation, "methods_for", lambda fragments, overlap: [first, last])
    figures = tmp_path / "figures.json"
    arguments = ["--namespaces", two_namespaces, "--values", "50000", "--fragments", "2", "--overlap", "1"]
    arguments += ["--step-seconds", "0.05", "--turns", "1", "--cycles", "1", "--json", str(figures)]
    done = CliRunner().invoke(utilisation.main, arguments, catch_exceptions=False)
    assert done.output.strip().splitlines()[-1].startswith("verdict: ")
    content = json.loads(figures.read_text())
    assert [row["swarm"] for row in content["rows"]] == [first.name, last.name]
    assert all(row["computes"] > 0 and 0 < row["planned"] <= 1 for row in content["rows"])
    assert len(content["bars"]) == 2
    assert not child_processes()


def test_swarms_are_held_against_the_bar_and_against_their_plan() -> None:
    rows = [{"swarm": "DiLoCo", "computes": 0.5, "planned": 0.55}, {"swarm": "both", "computes": 0.98, "planned": 0.85}]
    best, planned = utilisation.bars_of(rows)
    assert (best.ratio, best.is_met) == (0.98, True)
    assert planned.ratio == pytest.approx(0.87)
    assert not planned.is_met


def test_a_way_is_planned_as_its_swarm_trains() -> None:
    diloco, streaming, overlapped, fewer_bits = utilisation.methods_for(4, 2)
    peers = (PeerGroup("peer", 2, 1e6, 1e6, 0.0, 1.0),)
    plans = [way.plan(peers, 4098, 20) for way in (diloco, streaming, overlapped, fewer_bits)]
    assert [plan.fragments for plan in plans] == [(4098,), *[(1024, 1025, 1024, 1025)] * 3]
    assert [plan.overlap for plan in plans] == [0, 0, 2, 2]
    assert [plan.bits for plan in (plans[0], plans[-1])] == [8 + 32 / 1024, 4 + 32 / 1024]


@pytest.mark.parametrize(
    ("rates", "seconds"),
    [
        ([10, 10], 10),
        ([10, 5], 20),
        ([10, 10, 10], 100 * 4 / 3 / 10),
        ([10, 10, 10, 10], 100 * 3 / 2 / 10),
        ([100, 100, 100, 1], 100),  # it only sends its blocks and receives the average
        ([10, 10, 10, 7.5], 100 * 6 / 37.5),  # reduces 1/10 of what the others do: all are done together
    ],
    ids=str,
)
def test_the_best_split_of_a_round(rates: list[float], seconds: float) -> None:
    assert least_seconds(100, rates) == pytest.approx(seconds)


def test_a_link_is_as_fast_as_its_slower_direction() -> None:
    flows = {("a", "b"): 1.0, ("a", "c"): 2.0, ("b", "a"): 4.0, ("b", "c"): 8.0, ("c", "a"): 16.0, ("c", "b"): 32.0}
    rates = LinkRates.of_flows(["a", "b", "c"], flows)
    assert rates == LinkRates(up=(3, 12, 48), down=(20, 33, 10))
    assert rates.both_ways == [3, 12, 10]


def test_the_bar_on_links_is_what_is_possible() -> None:
    ours, gloo = (Group(contender, (), seconds=[2.0, 4.0, 3.0]) for contender in (CONTENDERS[0], CONTENDERS[-1]))
    gloo.seconds = [4.0, 6.0, 6.0]
    possible, faster = bars_of({OURS: ours, GLOO_BYTES: gloo}, Possible(alone=1.0, at_once=2.4), 16, 0.75)
    assert possible.name == "what iperf3 -P 16 allows / ours, 0 peers"
    assert (possible.ratio, possible.at_least) == pytest.approx((0.8, 0.75))
    assert (faster.ratio, faster.at_least) == (2.0, 1.0)


def test_what_peers_are_told_about_their_place() -> None:
    place = Place(("ip",), "10.1.1.1", "wan0", ("--upload-limit", "3"))
    assert place.for_vector_peer == ["--listen", "/ip4/10.1.1.1/tcp/0", "--upload-limit", "3"]
    assert place.for_averagers == ["--address", "10.1.1.1", "--interface", "wan0"]


def test_without_iperf3_links_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.namespaces.shutil.which", lambda name: None)
    for command in (averaging.main, wire.main):
        done = CliRunner().invoke(command, ["--namespaces", "one,two"], catch_exceptions=False)
        assert (done.exit_code, done.stdout) == (0, "")
        assert "iperf3 is not installed" in done.stderr


def a_wire() -> Wire:
    """Silent for a second but for a few messages, then a megabyte in a second, then silent again."""
    one = Wire()
    for number in range(301):
        at = number / 100
        data = int(1e6 * min(1.0, max(0.0, at - 1.0)))
        one.add(at, 500 + data, 700 + data)
    return one


def test_data_are_told_from_messages() -> None:
    assert a_wire().first_sent(0.0) == pytest.approx(1.04)
    assert a_wire().last_received(3.0) == pytest.approx(1.97)


def test_rates_are_those_between_two_looks() -> None:
    rates = a_wire().rates(0.985, 2.095)
    assert len(rates) == 55
    assert [at for at, _ in rates[:2]] == pytest.approx([0.02, 0.04])
    assert [rate for _, rate in rates[:3]] == pytest.approx([0.25e6, 1e6, 1e6])
    assert rates[-1][1] == 0


def test_the_traffic_of_a_round() -> None:
    said = [{"encoded": 0.3, "agreed": 2.9, "time": 3.5}, {"encoded": 0.4, "agreed": 2.97, "time": 3.5}]
    group = Group(CONTENDERS[0], (), began=[0.0], rounds=[said])
    rates = LinkRates(up=(1e6, 1e6), down=(1e6, 2e6))
    traffic = wire.traffic_of(group, 0, [a_wire(), a_wire()], rates)
    assert (traffic.seconds, traffic.encoding, traffic.first_byte) == pytest.approx((2.97, 0.4, 1.04))
    assert traffic.after_last == pytest.approx(1.0)
    assert traffic.talking == pytest.approx(1.64)
    assert traffic.well_used == pytest.approx(50 / 148 / 2)


def test_the_median_round_is_one_of_them() -> None:
    measured = [RoundTraffic(seconds, 0, 0, 0, 0, ()) for seconds in (3.0, 1.0, 2.0)]
    assert wire.median_traffic(measured) is measured[2]


def test_a_plot_has_all_its_lines_inside() -> None:
    panel = Panel("a < b", {"one": [(0.0, 0.0), (2.0, 50.0)], "two": [(1.0, 20.0)]}, ("limit", 100.0), {"end": 1.5})
    root = ElementTree.fromstring(svg([panel, panel], "seconds"))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("a < b") == 2
    assert {"limit", "end", "seconds", "100"} <= set(texts)
