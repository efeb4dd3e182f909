"""Asking a home router for a port with UPnP: the messages of an Internet Gateway Device, versions 1 and 2.

Bytes only, no sockets. Three formats are read here, all of them from whoever on the local network answers: a reply to a
search (HTTP over UDP), a description of the device (XML), and answers to commands (SOAP). A device is talked to at the
address from which it answered, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address
from urllib.parse import SplitResult, urljoin, urlsplit
from xml.parsers import expat

SEARCH_TARGETS = tuple(f"urn:schemas-upnp-org:device:InternetGatewayDevice:{version}" for version in (1, 2))
SERVICE_TYPES = tuple(
    f"urn:schemas-upnp-org:service:{name}" for name in ("WANIPConnection:1", "WANIPConnection:2", "WANPPPConnection:1")
)
SEARCH_WAIT = 2  # seconds within which devices answer a search
REPLY_LIMIT = 4096  # bytes of a reply to a search
URL_LENGTH = 512  # characters
DEPTH_LIMIT = 32  # elements in one another

CONFLICT = 718
ONLY_PERMANENT_LEASES = 725


class NonsenseError(ValueError):
    """What a device says is not what such a device says."""


class CommandError(Exception):
    """A device refused a command, with UPnP's own error code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"UPnP error {code}")
        self.code = code


@dataclass(frozen=True)
class Service:
    """A connection to the internet that a router offers to configure: its type, and where commands for it go."""

    kind: str
    url: SplitResult


def search_message(target: str) -> bytes:
    """Return the datagram that asks devices of a kind to say where they are."""
    lines = (
        "M-SEARCH * HTTP/1.1",
        "HOST: 239.255.255.250:1900",
        'MAN: "ssdp:discover"',
        f"MX: {SEARCH_WAIT}",
        f"ST: {target}",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def read_search_reply(data: bytes, sender: str) -> SplitResult | None:
    """Return the URL of the description of a device at `sender`; None: this is no reply of an internet gateway."""
    if len(data) > REPLY_LIMIT:
        return None
    first, *lines = data.decode("latin-1").split("\r\n")
    if first.split(" ")[:2] not in (["HTTP/1.1", "200"], ["HTTP/1.0", "200"]):
        return None
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("st") not in SEARCH_TARGETS:
        return None
    return _url_at(headers.get("location", ""), sender)


def read_description(data: bytes, location: SplitResult) -> list[Service]:
    """Return the services of a device's description that can map ports, in its order.

    Raises: NonsenseError.
    """
    services = []
    for name, values in read_elements(data):
        if name == "service" and values.get("serviceType") in SERVICE_TYPES:
            url = _url_at(values.get("controlURL", ""), str(location.hostname), location.geturl())
            if url is not None:
                services.append(Service(values["serviceType"], url))
    return services


def command_message(service: Service, action: str, arguments: dict[str, str]) -> bytes:
    """Return the body of a command. Arguments must be plain text that needs no escaping in XML."""
    values = "".join(f"<{name}>{value}</{name}>" for name, value in arguments.items())
    return (
        '<?xml version="1.0"?>\r\n'
        '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
        's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/">'
        f'<s:Body><u:{action} xmlns:u="{service.kind}">{values}</u:{action}></s:Body></s:Envelope>\r\n'
    ).encode()


def read_command_answer(data: bytes, action: str, status: int) -> dict[str, str]:
    """Return what a device answers to a command. Raises: CommandError, NonsenseError."""
    elements = read_elements(data)
    for name, values in elements:
        if name == "UPnPError":
            code = values.get("errorCode", "")
            raise CommandError(int(code) if code.isascii() and code.isdigit() and len(code) < 5 else 0)
    for name, values in elements:
        if name == f"{action}Response" and status == 200:
            return values
    raise NonsenseError(f"status {status} and no {action}Response")


def read_external_address(values: dict[str, str]) -> IPv4Address:
    """Return the address in an answer to GetExternalIPAddress. Raises: NonsenseError."""
    try:
        return IPv4Address(values.get("NewExternalIPAddress", ""))
    except ValueError as error:
        raise NonsenseError(str(error)) from error


def read_elements(data: bytes) -> list[tuple[str, dict[str, str]]]:
    """Return each element's name, without its namespace, and its children's texts by their names.

    A document type is refused: with it entities could be defined, which blow up or read files.
    Raises: NonsenseError.
    """
    found: list[tuple[str, dict[str, str]]] = []
    path: list[tuple[str, dict[str, str], list[str]]] = []

    def start(name: str, attributes: object) -> None:
        if len(path) >= DEPTH_LIMIT:
            raise NonsenseError("too many elements in one another")
        values: dict[str, str] = {}
        path.append((name.rpartition(" ")[2], values, []))
        found.append((path[-1][0], values))

    def end(name: str) -> None:
        own_name, _, texts = path.pop()
        if path:
            path[-1][1].setdefault(own_name, "".join(texts).strip())

    def text(characters: str) -> None:
        path[-1][2].append(characters)

    def document_type(*arguments: object) -> None:
        raise NonsenseError("a document type")

    parser = expat.ParserCreate(encoding="utf-8", namespace_separator=" ")
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = text, document_type
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise NonsenseError(str(error)) from error
    return found


def _url_at(text: str, host: str, base: str = "") -> SplitResult | None:
    """Return a URL, made whole with `base`, if it is one of plain HTTP at this address."""
    if not text.isascii() or not text.isprintable() or " " in text or len(text) > URL_LENGTH:
        return None
    try:
        url = urlsplit(urljoin(base, text))
        port = url.port
    except ValueError:
        return None
    return url if url.scheme == "http" and url.hostname == host and port != 0 and "@" not in url.netloc else None
