"""A peer's metrics for Prometheus, and its health. Metrics are always counted; the program that starts the peer decides
whether to serve them.

docs/metrics.md has all names, and a test compares.
"""

from __future__ import annotations

import io
import json
import logging
import math
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from threading import Thread
from typing import TYPE_CHECKING, Any, TextIO
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, make_server

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.exposition import ThreadingWSGIServer

from peers.errors import LISTEN_ERRORS, LocalNetworkError
from peers.values.system import now
from peers.values.wire import PROTOCOL_VERSION

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

logger = logging.getLogger(__name__)


class Health:
    """The health of a process, as its parts report it. Thread-safe for reading.

    A part either reports signs of life, each with the time until the next, or reports a failure. A part that has not
    reported yet counts as healthy, so that a starting process is not reported as failing.
    """

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self._clock = clock
        # By part: the time of its last sign of life, the latest time for the next, the failure to report after that.
        self._due: dict[str, tuple[float, float, str]] = {}
        self._failures: dict[str, str] = {}

    def expect(self, part: str, within: float, lacking: str) -> None:
        """Record a part's sign of life. If no other follows within `within` seconds, the process counts as failing for
        the reason `lacking`, such as "no heartbeat was published"."""
        seen = self._clock()
        self._due[part] = seen, seen + within, lacking

    def failing(self, part: str, reason: str) -> None:
        """Record that a part of the process fails, until `recovered` or `forget` is called for it."""
        self._failures[part] = reason

    def recovered(self, part: str) -> None:
        """Record that a part of the process, named `part`, no longer fails."""
        self._failures.pop(part, None)

    def forget(self, part: str) -> None:
        """Remove a part of the process that has ended, so that it needs no sign of life and does not fail."""
        self._due.pop(part, None)
        self._failures.pop(part, None)

    @property
    def reasons(self) -> list[str]:
        """The reasons why the process counts as failing; empty if it is healthy."""
        time = self._clock()
        late = [
            f"{lacking} for {time - seen:.0f} seconds" for seen, due, lacking in list(self._due.values()) if time > due
        ]
        return [*self._failures.copy().values(), *late]


HEALTH = Health()
"""The health of this process."""

ENTRIES_APPLIED = Counter("diloco_peer_entries_applied", "Log entries applied")
TOKENS_COUNTED = Counter("diloco_peer_tokens_counted", "Own tokens in applied entries")
ROUNDS = Counter("diloco_peer_rounds", "Rounds with this peer")
ROUND_SECONDS = Counter("diloco_peer_round_seconds", "Seconds in rounds")
ROUND_BYTES = Counter("diloco_peer_round_bytes", "Bytes moved in rounds", ["direction"])
MEASURING_BYTES = Counter("diloco_peer_measuring_bytes", "Bytes moved to measure links", ["direction"])
MONTH_BYTES = Gauge("diloco_peer_month_bytes", "Bytes of model data in this calendar month (UTC)", ["direction"])
MONTH_LIMIT_BYTES = Gauge("diloco_peer_month_limit_bytes", "Monthly limit in bytes", ["direction"])
PAYLOADS_FETCHED = Counter("diloco_peer_payloads_fetched", "Missed entries fetched from peers")
STATES_FETCHED = Counter("diloco_peer_states_fetched", "Snapshots fetched from peers")
TOKENS_LOST = Counter("diloco_peer_tokens_lost", "Own tokens that no entry counts", ["what"])
HEARTBEATS = Counter("diloco_peer_heartbeats", "Beats and heartbeats sent")
RELAYED_BYTES = Counter("diloco_peer_relayed_bytes", "Bytes relayed for other peers")
RELAYED_CONNECTIONS = Gauge("diloco_peer_relayed_connections", "Connections relayed now")
DROPPED = Counter("diloco_peer_dropped", "Invalid data refused", ["what"])
OUTER_STEP = Gauge("diloco_peer_outer_step", "Entries in the log")
LINEAGE_TOKENS = Gauge("diloco_peer_lineage_tokens", "Tokens of all peers in the log")
LIVE_PEERS = Gauge("diloco_peer_live_peers", "Other live peers")
RELAYED_PEERS = Gauge("diloco_peer_relayed_peers", "Live peers reached only by relay")
UNREACHED_PEERS = Gauge("diloco_peer_unreached_peers", "Live peers out of reach")
TROUBLED = Gauge("diloco_peer_troubled", "1 while this peer's work does not count")
TOKENS_PER_SECOND = Gauge("diloco_peer_tokens_per_second", "Training speed")
LOSS = Gauge("diloco_peer_loss", "Loss of the last inner step, nats per token")
HELD_OUT_LOSS = Gauge("diloco_peer_held_out_loss", "Held-out loss, nats per token")
KNOWN_RUNS = Gauge("diloco_peer_known_runs", "Runs that a bootstrap node remembers")
RUN_LIVE_PEERS = Gauge("diloco_peer_run_live_peers", "Live peers of a run, seen by a bootstrap node", ["run"])
ARCHIVED_OUTER_STEP = Gauge("diloco_peer_archived_outer_step", "Archived entries of a run", ["run"])
ARCHIVED_STEPS_LEFT = Gauge("diloco_peer_archived_outer_steps_left", "Outer steps left of an archived run", ["run"])
HEALTHY = Gauge("diloco_peer_healthy", "1 while /healthz answers 200, else 0")
BUILD = Info("diloco_peer_build", "Protocol version")

_OF_PROCESSES = GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, HEALTHY, BUILD, DROPPED, MEASURING_BYTES
_OF_NODES = RELAYED_BYTES, RELAYED_CONNECTIONS, KNOWN_RUNS, RUN_LIVE_PEERS, ARCHIVED_OUTER_STEP, ARCHIVED_STEPS_LEFT
NODE_METRICS = CollectorRegistry()
"""The metrics that a bootstrap node serves. A volunteer serves those of REGISTRY, which has all."""
for _collector in (*_OF_PROCESSES, *_OF_NODES):
    NODE_METRICS.register(_collector)

for _gauge in (OUTER_STEP, LINEAGE_TOKENS, LIVE_PEERS, RELAYED_PEERS, UNREACHED_PEERS, LOSS, HELD_OUT_LOSS, KNOWN_RUNS):
    _gauge.set(math.nan)  # NaN until the value is known, since 0 would be a value, and for a loss the best

HEALTHY.set_function(lambda: not HEALTH.reasons)
BUILD.info({"protocol": str(PROTOCOL_VERSION)})


def bytes_moved(counter: Counter) -> tuple[int, int]:
    """Return the bytes sent and the bytes received, from a counter with the label `direction`."""
    samples = [sample for one in counter.collect() for sample in one.samples if sample.name.endswith("_total")]
    counted = {sample.labels["direction"]: sample.value for sample in samples}
    return int(counted.get("sent", 0)), int(counted.get("received", 0))


REQUESTS_AT_ONCE = 32  # maximum number of requests answered at once, each by a thread; a scraper needs one
REQUEST_BYTES = 1 << 14
"""Maximum bytes of a request that are read. The library would hold six megabytes of its headers."""
REQUEST_SECONDS = 10.0
"""Seconds to wait for the next bytes of a request, or for room to send its answer."""


class MetricsServer:
    """A server for GET /metrics and /healthz, in its own thread, so that it can report that everything else hangs."""

    def __init__(self, port: int, host: str = "127.0.0.1", registry: CollectorRegistry = REGISTRY) -> None:
        """Start serving the metrics of `registry`, by default for this machine only. Raises: InUseError if the port is
        in use; OwnAddressError if the host does not exist; LocalNetworkError for other causes."""
        # Do not list the time at which each counter began, which doubles the lines.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        try:
            answer = partial(_answer, make_wsgi_app(registry))
            self._server = make_server(host, port, answer, _Server, _SilentHandler)
        except OSError as error:
            raise LISTEN_ERRORS.get(error.errno, LocalNetworkError)(
                f"metrics cannot be served on {host}, port {port}: {error.strerror}.",
                "Choose another --metrics-port, and an address of this machine as --metrics-host.",
            ) from error
        self.address: tuple[str, int] = self._server.server_address[:2]  # type: ignore[assignment]
        self._thread = Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def log_address(self) -> None:
        logger.info("metrics are at http://%s:%d/metrics, and health is at /healthz", *self.address)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingWSGIServer):
    """A server with a thread for each request. If there are too many requests, it closes the oldest one, so that a new
    one is always answered."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._open: dict[socket.socket, None] = {}  # sockets of open requests, the oldest first

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._open) >= REQUESTS_AT_ONCE:
            with suppress(OSError, StopIteration):  # the oldest request may have ended already
                oldest = next(iter(tuple(self._open)))
                self._open.pop(oldest, None)
                oldest.shutdown(socket.SHUT_RDWR)
        self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("a request for metrics of %s failed", client_address, exc_info=True)


class _Answer(ServerHandler):
    request_handler: WSGIRequestHandler
    server_software = ""  # strangers need not know the version of Python: send no header `Server`


class _SilentHandler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS
    server_version = sys_version = ""  # in answers to malformed requests

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile)

    def handle(self) -> None:  # the one of the standard library always sends a header `Server`
        self.raw_requestline = self.rfile.readline()
        if self.parse_request():
            files = self.rfile, self.wfile, self.get_stderr()
            answer = _Answer(*files, self.get_environ())  # type: ignore[arg-type]
            answer.request_handler = self
            answer.run(self.server.get_app())  # type: ignore[attr-defined]

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, so that scrapes do not fill the log."""

    def get_stderr(self) -> TextIO:
        """Return a stream that discards the traceback of a failed request, since strangers could fill the log."""
        return io.StringIO()


class _Head(io.BufferedReader):
    """A reader of a request that reads at most the first REQUEST_BYTES bytes."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        super().__init__(file.detach())
        self._left = REQUEST_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(min(self._left, self._left if size is None or size < 0 else size))
        self._left -= len(line)
        return line


def _answer(
    metrics: Callable[..., Iterable[bytes]], environ: WSGIEnvironment, start_response: StartResponse
) -> Iterable[bytes]:
    path = environ.get("PATH_INFO", "")
    if path == "/metrics":
        return metrics(environ, start_response)
    if path == "/healthz":
        reasons = HEALTH.reasons
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        content_type, body = "application/json", json.dumps({"healthy": not reasons, "reasons": reasons})
    else:
        status, content_type, body = HTTPStatus.NOT_FOUND, "text/plain", "There are /metrics and /healthz."
    start_response(f"{status.value} {status.phrase}", [("Content-Type", content_type), ("Cache-Control", "no-store")])
    return [f"{body}\n".encode()]
