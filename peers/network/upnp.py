"""A client of home routers with UPnP (Internet Gateway Device, versions 1 and 2), to have a port mapped.

Three formats are read here, from any device on the local network that answers: a reply to a search (HTTP over UDP), a
description of the device (XML), and answers to commands (SOAP). Further requests go only to the address from which a
device has answered.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from urllib.parse import SplitResult, urljoin, urlsplit
from xml.etree import ElementTree

import h11

from peers.network.gateway import Arrivals, Mapping

logger = logging.getLogger(__name__)

SEARCH_TARGETS = tuple(f"urn:schemas-upnp-org:device:InternetGatewayDevice:{version}" for version in (1, 2))
SERVICE_TYPES = tuple(
    f"urn:schemas-upnp-org:service:{name}" for name in ("WANIPConnection:1", "WANIPConnection:2", "WANPPPConnection:1")
)
SEARCH_WAIT = 2  # seconds within which devices answer a search
REPLY_LIMIT = 4096  # bytes of a reply to a search, at most
URL_LENGTH = 512  # characters of a URL that a device gives, at most

CONFLICT, ONLY_PERMANENT_LEASES = "718", "725"  # UPnP error codes of AddPortMapping

SEARCH_ADDRESS = ("239.255.255.250", 1900)
SEARCH_SECONDS = SEARCH_WAIT + 0.5  # seconds to wait for replies to a search: SEARCH_WAIT, and time for the packets
DEVICE_LIMIT = 4  # devices asked after one search, at most, and services asked of one device, at most
HTTP_SECONDS = 5.0  # seconds for one HTTP request and its answer
HTTP_LIMIT = 128 * 1024  # bytes of one HTTP answer, at most
PORT_TRIES = 3  # external ports that are tried, at most: our own port's number, then random ones
FREE_PORTS = (49152, 65535)  # the range of ports that any program may use
DESCRIPTION = "diloco-peer"


class _UpnpError(Exception):
    """A device's refusal of a command, with a UPnP error code; or its invalid answer, without a code."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


UNANSWERED = (OSError, _UpnpError)


@dataclass(frozen=True)
class _Service:
    """A router's internet connection that can be configured: its service type, and the URL for commands."""

    kind: str
    url: SplitResult


class Upnp:
    """A client of the home router. If the router does not answer at its last address, it is searched for again."""

    name = "UPnP"

    def __init__(self, search_address: tuple[str, int] = SEARCH_ADDRESS, seconds: float = SEARCH_SECONDS) -> None:
        self._search_address = search_address
        self._seconds = seconds
        self._service: _Service | None = None
        self._external_port = 0

    async def open(self, port: int, lifetime: float) -> Mapping | None:
        """Map a TCP port for `lifetime` seconds. Return the mapping; None if no router offers one. Raises: OSError."""
        if self._service is not None:
            with suppress(*UNANSWERED):
                return await self._map(self._service, port, lifetime)
        self._service, self._external_port = None, 0
        async with aclosing(_search(self._search_address, self._seconds)) as locations:
            async for location in locations:
                for service in await _services_at(location):
                    try:
                        mapping = await self._map(service, port, lifetime)
                    except UNANSWERED as error:
                        logger.debug("UPnP at %s: %r", service.url.netloc, error)
                        continue
                    self._service = service
                    return mapping
        return None

    async def close(self, port: int) -> None:
        """Delete the mapping from the router, if there is one. Raises: OSError."""
        service, external_port = self._service, self._external_port
        self._service, self._external_port = None, 0
        if service is not None:
            arguments = {"NewRemoteHost": "", "NewExternalPort": str(external_port), "NewProtocol": "TCP"}
            with suppress(_UpnpError):
                await _command(service, "DeletePortMapping", arguments)

    async def _map(self, service: _Service, port: int, lifetime: float) -> Mapping:
        """Map a TCP port by a router's service. Return the mapping. Raises: _UpnpError, OSError."""
        answer, own_address = await _command(service, "GetExternalIPAddress", {})
        try:
            external = IPv4Address(answer.get("NewExternalIPAddress", ""))
        except ValueError as error:
            raise _UpnpError(str(error)) from error
        wanted = [self._external_port or port, *(random.randint(*FREE_PORTS) for _ in range(PORT_TRIES - 1))]
        for external_port in wanted:
            arguments = {
                "NewRemoteHost": "",
                "NewExternalPort": str(external_port),
                "NewProtocol": "TCP",
                "NewInternalPort": str(port),
                "NewInternalClient": own_address,
                "NewEnabled": "1",
                "NewPortMappingDescription": DESCRIPTION,
                "NewLeaseDuration": str(int(lifetime)),
            }
            try:
                await _add_mapping(service, arguments)
            except _UpnpError as error:
                if error.code != CONFLICT:
                    raise
                continue
            self._external_port = external_port
            return Mapping(external, external_port, lifetime)
        raise _UpnpError("all ports that were tried are taken", CONFLICT)


async def _services_at(location: SplitResult) -> list[_Service]:
    """Return the services of a device that map ports; none if the device gives no valid description."""
    try:
        status, description, _ = await _request(location, "GET")
        if status != 200:
            raise _UpnpError(f"status {status}")
        return _read_description(description, location)[:DEVICE_LIMIT]
    except UNANSWERED as error:
        logger.debug("UPnP at %s: %r", location.netloc, error)
        return []


async def _add_mapping(service: _Service, arguments: dict[str, str]) -> None:
    """Send AddPortMapping. If the router has only permanent mappings, add one of those, which only `close` ends."""
    try:
        await _command(service, "AddPortMapping", arguments)
    except _UpnpError as error:
        if error.code != ONLY_PERMANENT_LEASES:
            raise
        await _command(service, "AddPortMapping", arguments | {"NewLeaseDuration": "0"})


async def _command(service: _Service, action: str, arguments: dict[str, str]) -> tuple[dict[str, str], str]:
    """Send a command. Return the answer's values by name, and our own IP address towards the device.

    Raises: _UpnpError, OSError.
    """
    headers = [("SOAPAction", f'"{service.kind}#{action}"'), ("Content-Type", 'text/xml; charset="utf-8"')]
    body = _command_message(service, action, arguments)
    status, answer, own_address = await _request(service.url, "POST", headers, body)
    return _read_command_answer(answer, action, status), own_address


async def _search(address: tuple[str, int], seconds: float) -> AsyncGenerator[SplitResult, None]:
    """Search for routers for `seconds`. Yield each answering device's description URL once. Raises: OSError."""
    transport, arrivals = await asyncio.get_running_loop().create_datagram_endpoint(
        Arrivals, family=socket.AF_INET, local_addr=("0.0.0.0", 0)
    )
    seen: set[SplitResult] = set()
    try:
        for target in SEARCH_TARGETS:
            transport.sendto(_search_message(target), address)
        deadline = asyncio.get_running_loop().time() + seconds
        while len(seen) < DEVICE_LIMIT:
            try:
                async with asyncio.timeout_at(deadline):
                    reply = await arrivals.queue.get()
            except TimeoutError:
                return
            location = _read_search_reply(*reply) if reply else None
            if location is not None and location not in seen:
                seen.add(location)
                yield location
    finally:
        transport.abort()


async def _request(
    url: SplitResult, method: str, headers: list[tuple[str, str]] | None = None, body: bytes = b""
) -> tuple[int, bytes, str]:
    """Send an HTTP request. Return the answer's status and body, and our own IP address on that connection.

    Raises: OSError (a TimeoutError is one), _UpnpError.
    """
    async with asyncio.timeout(HTTP_SECONDS):
        reader, writer = await asyncio.open_connection(url.hostname, url.port or 80, limit=HTTP_LIMIT)
        try:
            connection = h11.Connection(h11.CLIENT)
            target = (url.path or "/") + (f"?{url.query}" if url.query else "")
            fixed = [("Host", url.netloc), ("Connection", "close"), ("Content-Length", str(len(body)))]
            request = h11.Request(method=method, target=target, headers=[*fixed, *(headers or [])])
            for event in (request, h11.Data(data=body), h11.EndOfMessage()):
                writer.write(connection.send(event) or b"")
            status, answer = await _read_answer(connection, reader)
            return status, answer, str(writer.get_extra_info("sockname")[0])
        except h11.ProtocolError as error:
            raise _UpnpError(str(error)) from error
        finally:
            writer.transport.abort()


async def _read_answer(connection: h11.Connection, reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read an HTTP answer. Return its status and body. Raises: h11.RemoteProtocolError, _UpnpError, OSError."""
    status, body, received = 0, bytearray(), 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(HTTP_LIMIT)
            received += len(data)
            if received > HTTP_LIMIT:
                raise _UpnpError(f"more than {HTTP_LIMIT} bytes")
            connection.receive_data(data)
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return status, bytes(body)


# Formats of messages ------------------------------------------------------------------------------------------
def _search_message(target: str) -> bytes:
    """Return the search datagram to which devices of type `target` reply with their descriptions' URLs."""
    lines = (
        "M-SEARCH * HTTP/1.1",
        "HOST: 239.255.255.250:1900",
        'MAN: "ssdp:discover"',
        f"MX: {SEARCH_WAIT}",
        f"ST: {target}",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def _read_search_reply(data: bytes, sender: str) -> SplitResult | None:
    """Return the URL of the description of a device at `sender`; None if `data` is no reply of an internet gateway."""
    if len(data) > REPLY_LIMIT:
        return None
    first, *lines = data.decode("latin-1").split("\r\n")
    if first.split(" ")[:2] not in (["HTTP/1.1", "200"], ["HTTP/1.0", "200"]):
        return None
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("st") not in SEARCH_TARGETS:
        return None
    return _url_at(headers.get("location", ""), sender)


def _read_description(data: bytes, location: SplitResult) -> list[_Service]:
    """Return the services that can map ports, from the XML description of a device.

    Raises: _UpnpError.
    """
    services = []
    for name, values in _read_elements(data):
        if name == "service" and values.get("serviceType") in SERVICE_TYPES:
            url = _url_at(values.get("controlURL", ""), str(location.hostname), location.geturl())
            if url is not None:
                services.append(_Service(values["serviceType"], url))
    return services


def _command_message(service: _Service, action: str, arguments: dict[str, str]) -> bytes:
    """Return the XML body of a command. Arguments must be plain text that needs no escaping in XML."""
    values = "".join(f"<{name}>{value}</{name}>" for name, value in arguments.items())
    return (
        '<?xml version="1.0"?>\r\n'
        '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
        's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/">'
        f'<s:Body><u:{action} xmlns:u="{service.kind}">{values}</u:{action}></s:Body></s:Envelope>\r\n'
    ).encode()


def _read_command_answer(data: bytes, action: str, status: int) -> dict[str, str]:
    """Return the values in a device's answer to a command, by name. Raises: _UpnpError."""
    elements = _read_elements(data)
    for name, values in elements:
        if name == "UPnPError":
            raise _UpnpError("the command is refused", values.get("errorCode", ""))
    for name, values in elements:
        if name == f"{action}Response" and status == 200:
            return values
    raise _UpnpError(f"status {status} and no {action}Response")


class _TreeBuilder(ElementTree.TreeBuilder):
    """A tree builder that refuses a document type, which could define entities that fill the memory or read files."""

    def doctype(self, *arguments: object) -> None:
        raise _UpnpError("its XML has a document type, which is refused")


def _read_elements(data: bytes) -> list[tuple[str, dict[str, str]]]:
    """Return each element's name without its namespace, and a dict from its children's names to their texts.

    Raises: _UpnpError.
    """
    try:
        root = ElementTree.fromstring(data, ElementTree.XMLParser(target=_TreeBuilder(), encoding="utf-8"))
    except (ElementTree.ParseError, ValueError) as error:
        raise _UpnpError(str(error)) from error

    def name(element: ElementTree.Element) -> str:
        return element.tag.rpartition("}")[2]

    # If several children have one name, the first counts.
    return [
        (name(element), {name(child): (child.text or "").strip() for child in reversed(element)})
        for element in root.iter()
    ]


def _url_at(text: str, host: str, base: str = "") -> SplitResult | None:
    """Return a URL, completed by `base`, if it is plain HTTP at this host; else None."""
    if not text.isascii() or not text.isprintable() or " " in text or len(text) > URL_LENGTH:
        return None
    try:
        url = urlsplit(urljoin(base, text))
        port = url.port
    except ValueError:
        return None
    return url if url.scheme == "http" and url.hostname == host and port != 0 and "@" not in url.netloc else None
