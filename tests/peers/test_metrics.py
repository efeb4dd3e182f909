"""What a peer counts, what it says of its health, and who may read it."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from urllib.error import HTTPError
from wsgiref.simple_server import ServerHandler

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest

import opendiloco.storage.checkpointer
import opendiloco.workers.telemetry  # noqa: F401  (both count)
from peers import metrics
from peers.errors import LocalNetworkError, OwnAddressError
from peers.metrics import DROPPED, NODE_METRICS, Health, MetricsServer

UNUSUAL = "diloco_peer_held_out_bits_per_byte use base unit"
"""The one thing that promtool finds: it takes the field's own unit for another one's."""


@pytest.fixture
def health(monkeypatch: pytest.MonkeyPatch) -> Health:
    fresh = Health(lambda: fresh.time)  # type: ignore[attr-defined]
    fresh.time = 100.0  # type: ignore[attr-defined]
    monkeypatch.setattr(metrics, "HEALTH", fresh)
    return fresh


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer(0)
    yield server
    server.close()


def get(server: MetricsServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.address[1]}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_what_a_process_does_not_know_has_no_value() -> None:
    """Regression: a bootstrap node told of a loss of 0."""
    ask = (
        "from prometheus_client import generate_latest; import peers.metrics, opendiloco.workers.telemetry\n"
        "print(generate_latest().decode())"
    )
    page = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True, timeout=60).stdout
    ours = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("diloco_peer_"))
    for name in ("loss", "held_out_loss", "training_loss", "outer_step", "live_peers", "known_runs"):
        assert ours[f"diloco_peer_{name}"] == "NaN"


def test_a_host_that_does_not_exist_is_a_mistake_of_the_options() -> None:
    """Regression: it ended with 5, after which systemd tries again for ever."""
    with pytest.raises(OwnAddressError, match="served on no host, port 0: Name or service not known"):
        MetricsServer(0, "no host")


@pytest.mark.parametrize("request_line", [b"GET /healthz HTTP/1.1", b"GET / / HTTP/1.1"])
def test_strangers_do_not_learn_the_version_of_python(server: MetricsServer, request_line: bytes) -> None:
    with socket.create_connection(server.address, timeout=30) as connection:
        connection.sendall(request_line + b"\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.")
    assert b"Python" not in answer
    assert "Python" in ServerHandler.server_software, "regression: it was changed for other servers of this process"


def test_counts_are_served_to_this_machine_and_a_port_in_use_is_a_clear_error(server: MetricsServer) -> None:
    before = REGISTRY.get_sample_value("diloco_peer_dropped_total", {"what": "message"}) or 0
    DROPPED.labels("message").inc()
    address, port = server.address
    assert address == "127.0.0.1", "regression: anybody in the network could read them"
    with pytest.raises(LocalNetworkError, match=f"port {port}"):
        MetricsServer(port)
    status, said = get(server, "/metrics")
    assert status == 200
    assert f'diloco_peer_dropped_total{{what="message"}} {before + 1}' in said
    assert get(server, "/else")[0] == 404


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"X: a\r\n" * 10_000 + b"\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=x\r\n\r\n",
        bytes(range(256)) * 20 + b"\r\n\r\n",
        b"GET /metr",
    ],
    ids=["a long header", "many headers", "a long path", "a strange version", "binary", "half a request"],
)
def test_strangers_write_nothing_into_the_log(
    server: MetricsServer, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, request_bytes: bytes
) -> None:
    """Regression: each such request left a traceback."""
    with caplog.at_level("INFO"):
        for resets in (False, True):
            with socket.create_connection(server.address, timeout=30) as stranger, suppress(ConnectionError):
                stranger.sendall(request_bytes)
                if resets:  # what it is answered can't be sent
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    with suppress(OSError):  # it has been hung up on already
                        stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(1 << 16):
                        pass
        assert get(server, "/healthz")[0] in (200, 503)
    deadline = time.monotonic() + 60
    while server._server._open:
        assert time.monotonic() < deadline, "a request is not over"
        time.sleep(0.01)
    assert capfd.readouterr().err == ""
    assert not caplog.records


def test_a_request_without_end_is_not_held(server: MetricsServer) -> None:
    """Regression: 32 strangers had a volunteer hold 340 MB of headers."""
    with socket.create_connection(server.address, timeout=30) as stranger:
        stranger.sendall(b"GET /metr HTTP/1.1\r\nX: " + b"a" * 60_000)
        assert stranger.recv(12) == b"HTTP/1.0 404", "the rest is not waited for"
    assert get(server, "/else")[0] == 404


def test_silent_connections_shut_nobody_out(server: MetricsServer) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(3 * metrics.REQUESTS_AT_ONCE):
            stranger = stack.enter_context(socket.create_connection(server.address, timeout=30))
            stranger.sendall(b"GET /metr")
            last = stranger
        assert get(server, "/else")[0] == 404
        assert len(server._server._open) <= metrics.REQUESTS_AT_ONCE
        assert threading.active_count() - before <= 2 * metrics.REQUESTS_AT_ONCE
        last.sendall(b"ics HTTP/1.0\r\n\r\n")
        assert last.recv(12) == b"HTTP/1.0 200"


def test_a_process_is_healthy_until_something_lacks_or_fails(server: MetricsServer, health: Health) -> None:
    assert get(server, "/healthz") == (200, '{"healthy": true, "reasons": []}\n'), "it only starts"
    health.expect("heartbeat", 10.0, "no heartbeat was published")
    health.time += 9  # type: ignore[attr-defined]
    assert get(server, "/healthz")[0] == 200
    health.time += 4  # type: ignore[attr-defined]
    health.failing("workers", "the worker was killed")
    status, said = get(server, "/healthz")
    assert status == 503
    reasons = ["the worker was killed", "no heartbeat was published for 13 seconds"]
    assert json.loads(said) == {"healthy": False, "reasons": reasons}
    assert REGISTRY.get_sample_value("diloco_peer_healthy") == 0
    health.recovered("workers")
    health.expect("heartbeat", 10.0, "no heartbeat was published")
    assert get(server, "/healthz")[0] == 200
    assert REGISTRY.get_sample_value("diloco_peer_healthy") == 1


def test_nothing_is_expected_of_what_is_over(health: Health) -> None:
    health.expect("training", 10.0, "training has not gone on")
    health.failing("training", "it failed")
    health.time += 20  # type: ignore[attr-defined]
    assert len(health.reasons) == 2
    health.forget("training")
    assert health.reasons == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_names_are_as_prometheus_wants_them() -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=generate_latest(), capture_output=True, timeout=60)
    found = [line for line in done.stdout.decode().splitlines() + done.stderr.decode().splitlines() if line]
    assert not [line for line in found if not line.startswith(UNUSUAL)]


def test_bytes_are_told_by_direction_and_not_when_the_counting_began() -> None:
    counter = Counter("test_moved_bytes", "For this test", ["direction"], registry=CollectorRegistry())
    assert metrics.bytes_moved(counter) == (0, 0)
    counter.labels("sent").inc(3)
    assert metrics.bytes_moved(counter) == (3, 0)


def test_a_bootstrap_node_serves_its_own_metrics_and_not_when_counting_began() -> None:
    """Regression: it listed losses and steps as NaN, and a `_created` beside each counter."""
    DROPPED.labels("message").inc()
    server = MetricsServer(0, registry=NODE_METRICS)
    _, page = get(server, "/metrics")
    server.close()
    names = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE ")}
    assert {"diloco_peer_dropped_total", "diloco_peer_checkpoints_total", "process_open_fds"} <= names
    assert not [name for name in names if name.endswith(("_created", "_loss", "outer_step")) and "archive" not in name]
    assert " NaN" not in page.replace("diloco_peer_known_runs NaN", "")


def test_losses_are_not_known_where_nothing_is_trained() -> None:
    """Regression: a bootstrap node had a loss of 0."""
    code = "from peers import metrics; from prometheus_client import generate_latest; print(generate_latest())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "diloco_peer_loss NaN" in shown
    assert "diloco_peer_held_out_loss NaN" in shown
