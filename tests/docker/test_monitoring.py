"""Prometheus' alert rules, and Grafana's dashboard, whose queries a real Prometheus answers."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import opendiloco.storage.checkpointer as checkpointer
from opendiloco.workers import telemetry
from peers import metrics
from tests.reference_pages import exposed

ROOT = Path(__file__).parent.parent.parent
ALERTS = ROOT / "docker" / "prometheus" / "alerts.yml"
BOARD: dict[str, Any] = json.loads((ROOT / "docker" / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
LIMIT = 60.0  # seconds that Prometheus may take
VARIABLES = {"$__rate_interval": "1m", "$job": ".*", "$instance": ".*"}
OTHERS = {"up"}  # that Prometheus makes itself

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs prometheus and promtool, of Debian's package prometheus",
)


def queries() -> list[str]:
    """All that the dashboard asks for, with its variables replaced as by somebody who chooses everything."""
    found = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", [])]
    for name, value in VARIABLES.items():
        found = [query.replace(name, value) for query in found]
    return found


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


# What is asked for exists ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("query", [*queries(), *(rule["expr"] for rule in alerts())])
def test_metrics_that_are_asked_for_are_counted(query: str) -> None:
    names = set(re.findall(r"\b(?:diloco_peer_\w+|up)\b", query))
    assert names
    assert names <= exposed().keys() | OTHERS
    assert "$" not in query


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    panels = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
    assert len(panels) >= 15
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}, "it can be had from any Prometheus"
    assert {variable["name"] for variable in BOARD["templating"]["list"]} == {"datasource", "job", "instance"}
    places = [
        (panel["gridPos"]["x"] + dx, panel["gridPos"]["y"] + dy)
        for panel in BOARD["panels"]
        for dx in range(panel["gridPos"]["w"])
        for dy in range(panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places)), "panels lie on each other"
    assert max(x for x, _ in places) < 24


def test_every_alert_says_what_to_do() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"].keys() == {"summary", "description"}


# Prometheus -----------------------------------------------------------------------------------------------------
@needs_prometheus
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "docker/prometheus/alerts.yml"),
        ("check", "config", "docker/prometheus/prometheus.yml"),
        ("test", "rules", "tests/docker/alerts.yml"),
    ],
    ids=["alerts", "configuration", "when alerts fire"],
)
def test_promtool_finds_nothing_wrong(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that scrapes this process: its address."""
    folder = tmp_path_factory.mktemp("prometheus")
    server = metrics.MetricsServer(0)
    set_gauges(1.0)
    something_has_happened()
    config = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"},
        "scrape_configs": [
            {"job_name": "diloco-peer", "static_configs": [{"targets": [f"127.0.0.1:{server.address[1]}"]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        yield listening(process)
    finally:
        process.kill()
        process.wait()
        server.close()
        set_gauges(math.nan)


def something_has_happened() -> None:
    """All that is known only of a peer that trains, or of a node with an archive, gets a value."""
    metrics.HELD_OUT_LOSS.set(2.5)
    metrics.DROPPED.labels("message").inc()
    metrics.TOKENS_LOST.labels("work").inc(100)
    metrics.RUN_LIVE_PEERS.labels("tiny").set(3)
    metrics.ARCHIVED_OUTER_STEP.labels("tiny").set(7)
    metrics.ARCHIVED_STEPS_LEFT.labels("tiny").set(93)
    for direction in ("sent", "received"):
        metrics.ROUND_BYTES.labels(direction).inc(1000)
    checkpointer.CHECKPOINTS.labels("saved").inc()


def set_gauges(value: float) -> None:
    """Those of training, which are NaN until there has been some."""
    for gauge in (*telemetry.GAUGES.values(), *telemetry.OUTER_GAUGES.values()):
        gauge.set(value)


def listening(process: subprocess.Popen[str]) -> str:
    """Where it says that it listens, once it answers. It is read to its end, so that it never waits for us."""
    found: list[str] = []
    is_ready = threading.Event()
    assert process.stderr is not None
    lines = process.stderr

    def read() -> None:
        for line in lines:
            if match := re.search(r'msg="Listening on" address=(\S+)', line):
                found.append(f"http://{match[1]}")
            if "Server is ready to receive web requests" in line:
                is_ready.set()
        is_ready.set()

    threading.Thread(target=read, daemon=True).start()
    assert is_ready.wait(LIMIT), "Prometheus does not say that it is ready"
    assert found, "Prometheus has ended"
    return found[0]


def ask(address: str, query: str) -> list[Any]:
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=LIMIT) as answer:
        said = json.load(answer)
    assert said["status"] == "success"
    result: list[Any] = said["data"]["result"]
    return result


def answer(address: str, query: str) -> list[Any]:
    """What Prometheus answers, once it has scraped twice."""
    deadline = time.monotonic() + LIMIT
    while not (result := ask(address, query)):
        assert time.monotonic() < deadline, f"nothing comes of {query}"
        time.sleep(0.1)
    return result


@pytest.mark.thorough
@needs_prometheus
def test_prometheus_answers_every_query_of_the_dashboard(prometheus: str) -> None:
    assert answer(prometheus, 'up{job="diloco-peer"} == 1')
    for query in queries():
        for series in answer(prometheus, query):
            assert series["value"][1] != "NaN", query


@pytest.mark.thorough
@needs_prometheus
def test_prometheus_has_what_the_dashboards_variables_ask_for(prometheus: str) -> None:
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variable["definition"])
            assert match
            assert answer(prometheus, f"count by ({match[2]}) ({match[1]})")[0]["metric"][match[2]]


def test_every_alert_is_in_the_page_on_metrics() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (Diloco\w+) \|", page, re.MULTILINE) == [rule["alert"] for rule in alerts()]
