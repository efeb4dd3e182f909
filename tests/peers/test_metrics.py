"""What a peer counts, and who may read it."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from typing import Any

import prometheus_client
import pytest
from prometheus_client import REGISTRY

from peers import metrics
from peers.errors import LocalNetworkError
from peers.metrics import DROPPED, serve_metrics


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The servers that are started; they end with the test, not only with the process."""
    started: list[Any] = []

    def start(port: int, host: str) -> None:
        started.append(prometheus_client.start_http_server(port, host))

    monkeypatch.setattr(metrics, "start_http_server", start)
    yield started
    for server, thread in started:
        server.shutdown()
        server.server_close()
        thread.join()


def test_counts_are_served_to_this_machine_and_a_port_in_use_is_a_clear_error(servers: list[Any]) -> None:
    before = REGISTRY.get_sample_value("diloco_peer_dropped_total", {"what": "message"}) or 0
    DROPPED.labels("message").inc()
    serve_metrics(0)
    ((server, _),) = servers
    address, port = server.server_address
    assert address == "127.0.0.1", "regression: anybody in the network could read them"
    with pytest.raises(LocalNetworkError, match=f"port {port}"):
        serve_metrics(port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert f'diloco_peer_dropped_total{{what="message"}} {before + 1}' in answer.read().decode()
