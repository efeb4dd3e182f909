"""The dashboard's web server: one page with its script and style, and the runs' data as JSON and server-sent events.

It answers only GET requests, has no credentials, and its pages load nothing from other sites. On a loopback address it
answers only requests whose Host is a loopback name, so that no web site can read it through a visitor's browser. Limits
on connections, on the time of a request and on the time of a write keep one client from shutting out the others.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from opendiloco.dashboard.watching import Board, NodeSources, RunWatch, RunWatches, Source
from peers.errors import LISTEN_ERRORS, LocalNetworkError
from peers.network.contacts import is_loopback
from peers.network.own_network import network_of
from peers.values.system import cancel_and_wait, start_task

if TYPE_CHECKING:
    from opendiloco.storage.archive import Archive
    from peers.network.transport import HivemindTransport
    from peers.values.manifest import SignedManifest


# Connections ----------------------------------------------------------------------------------------------------------
MOST_CONNECTIONS = 250  # most open connections, above which the server closes an old one (see `_count`)
REQUEST_SECONDS = 10.0  # seconds in which the headers of a connection's first request must arrive; no body is read
WRITE_SECONDS = 30.0  # seconds after which the server aborts a connection whose client reads nothing
END_OF_REQUEST = b"\r\n\r\n"


class _Connection(asyncio.Protocol):
    """The protocol of one connection: passes every event on to aiohttp's `handler`, and enforces the limits. `networks`
    maps all open connections of the server, oldest first, to the networks of their clients."""

    def __init__(self, handler: asyncio.Protocol, networks: dict[_Connection, str]) -> None:
        self._handler = handler
        self._networks = networks
        self._transport: asyncio.Transport
        self._last_bytes = b""  # the last 3 bytes received, because END_OF_REQUEST may arrive in pieces
        self._waiting: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._waiting = self._abort_after(REQUEST_SECONDS)
        self._handler.connection_made(transport)
        self._count(network_of(transport.get_extra_info("peername")[0]))

    def _count(self, network: str) -> None:
        """Add this connection. Above `MOST_CONNECTIONS`, abort the oldest connection of the network with the most
        connections, so that a flood from one network closes only its own connections."""
        self._networks[self] = network
        if len(self._networks) > MOST_CONNECTIONS:
            counts = Counter(self._networks.values())
            fullest = max(counts, key=counts.__getitem__)
            oldest = next(one for one, network in self._networks.items() if network == fullest)
            del self._networks[oldest]
            oldest.abort()

    def data_received(self, data: bytes) -> None:
        if self._waiting is not None:
            self._last_bytes += data
            if END_OF_REQUEST in self._last_bytes:
                self._waiting.cancel()
                self._waiting = None
            self._last_bytes = self._last_bytes[1 - len(END_OF_REQUEST) :]
        self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received()

    def pause_writing(self) -> None:
        self._writing = self._abort_after(WRITE_SECONDS)
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        self._handler.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._networks.pop(self, None)
        for timer in (self._waiting, self._writing):
            if timer is not None:
                timer.cancel()
        self._handler.connection_lost(error)

    def abort(self) -> None:
        self._transport.abort()

    def _abort_after(self, seconds: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self.abort)


# The server -----------------------------------------------------------------------------------------------------------
logger = logging.getLogger(__name__)
requests_logger = logging.getLogger(f"{__name__}.requests")
SHUTDOWN_SECONDS = 1.0  # seconds that the server waits for open pages before it closes them
REFRESH_SECONDS = 3.0  # most seconds that a request for a run's JSON waits for newer data
STATIC = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/format.js": ("format.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Return False for a log record of aiohttp about a client's malformed request, so that this record and its
    traceback are not logged."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


requests_logger.addFilter(_is_our_fault)


def bind(address: tuple[str, int]) -> socket.socket:
    """Return a socket that listens at this host and port; port 0 takes any free port. Raises: InUseError if the port is
    in use; OwnAddressError if the host does not exist; LocalNetworkError if the address cannot be bound."""
    host, port = address
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise LISTEN_ERRORS.get(error.errno, LocalNetworkError)(
            f"the dashboard cannot be served at {host} port {port}: {error.strerror or error}.",
            "Choose another --dashboard HOST:PORT.",
        ) from error
    if not is_loopback(listening.getsockname()[0]):
        address = listening.getsockname()[:2]
        logger.warning("the dashboard at %s port %d has no password: every host that reaches it can read it", *address)
    return listening


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


@asynccontextmanager
async def dashboard(listening: socket.socket | None, sources: Callable[[], Iterable[Source]]) -> AsyncIterator[None]:
    """Serve the runs of `sources` on the socket `listening` until the context ends; do nothing without a socket."""
    if listening is None:
        yield
        return
    watching = RunWatches(sources)
    runner = web.AppRunner(
        _application(watching, is_loopback(listening.getsockname()[0])),
        access_log=None,
        logger=requests_logger,
        shutdown_timeout=SHUTDOWN_SECONDS,
        handle_signals=False,
    )
    await runner.setup()
    handler, networks = runner.server, dict[_Connection, str]()
    assert handler is not None
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(handler(), networks), sock=listening)
    updating = start_task(watching.keep_updating())
    try:
        yield
    finally:
        await cancel_and_wait(updating)
        server.close()
        await runner.cleanup()


async def serve_all_runs(
    listening: socket.socket, archive: Archive | None, transport: HivemindTransport, manifests: Iterable[SignedManifest]
) -> None:
    """Serve a bootstrap node's dashboard until cancelled: all runs that are announced to the node, with the logs that
    its archive keeps."""
    sources = NodeSources(transport, archive.kept if archive else None)
    async with dashboard(listening, lambda: sources.current(manifests)):
        await asyncio.Event().wait()


def _application(watching: RunWatches, is_local: bool) -> web.Application:
    """Return the web application, which serves static files, and the runs' data as JSON and as server-sent events. With
    `is_local`, it answers only requests whose Host is a loopback name."""
    app = web.Application(middlewares=[_only_local] if is_local else [])
    app.on_response_prepare.append(_add_headers)
    for path, (name, content_type) in STATIC.items():
        content = files("opendiloco.dashboard").joinpath("static", name).read_bytes()
        app.router.add_get(path, _static(content, content_type))

    def watch_of(request: web.Request) -> RunWatch:
        watch = watching.runs.get(request.match_info["run"])
        if watch is None:
            raise web.HTTPNotFound(text="This node does not know this run.")
        return watch

    async def list_json(request: web.Request) -> web.Response:
        return web.json_response([watch.summary for watch in watching.runs.values()])

    async def list_events(request: web.Request) -> web.StreamResponse:
        return await _stream(request, watching.board)

    async def run_json(request: web.Request) -> web.Response:
        watch = watch_of(request)
        with suppress(TimeoutError):
            async with asyncio.timeout(REFRESH_SECONDS):
                await watch.update()
        return web.json_response(watch.history.sections())

    async def run_events(request: web.Request) -> web.StreamResponse:
        watch = watch_of(request)
        watch.show()
        return await _stream(request, watch.board)

    app.router.add_get("/api/runs", list_json)
    app.router.add_get("/events", list_events)
    app.router.add_get("/api/runs/{run}", run_json)
    app.router.add_get("/runs/{run}/events", run_events)
    return app


async def _stream(request: web.Request, board: Board) -> web.StreamResponse:
    """Send a board's sections as server-sent events until the client closes the connection."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
    with suppress(ConnectionError):  # the client has closed the page
        await response.prepare(request)
        async for section in board.changes():
            event = ": nothing new\n\n" if section is None else f"event: {section[0]}\ndata: {section[1]}\n\n"
            await response.write(event.encode())
    return response


def _static(content: bytes, content_type: str) -> Any:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=content, content_type=content_type, charset="utf-8")

    return answer


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)
    response.headers.popall("Server", None)


@web.middleware
async def _only_local(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    try:
        name = request.url.host or ""
    except ValueError:  # a malformed Host header
        name = ""
    if not is_loopback(name):
        text = "This dashboard answers only requests for a loopback name: a proxy must send `Host: localhost`."
        raise web.HTTPMisdirectedRequest(text=text)
    answer: web.StreamResponse = await handler(request)
    return answer
