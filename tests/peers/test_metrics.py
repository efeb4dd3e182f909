from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client import REGISTRY

from peers.errors import LocalNetworkError
from peers.metrics import DROPPED, serve_metrics


def test_counts_are_served_and_a_port_in_use_is_a_clear_error() -> None:
    before = REGISTRY.get_sample_value("diloco_peer_dropped_total", {"what": "message"}) or 0
    DROPPED.labels("message").inc()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        with pytest.raises(LocalNetworkError, match=f"port {port}"):
            serve_metrics(port, "127.0.0.1")
    stop = serve_metrics(port, "127.0.0.1")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert f'diloco_peer_dropped_total{{what="message"}} {before + 1}' in answer.read().decode()
    stop()
