"""Routers on the loopback interface that map ports by PCP, NAT-PMP and UPnP, as far as their clients can tell."""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import IPv4Address
from typing import cast

EXTERNAL = IPv4Address("11.77.0.9")  # documentation addresses are not public ones
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
GATEWAY_DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"

DESCRIPTION = """<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><device><deviceType>{device}</deviceType><serviceList><service>
<serviceType>urn:schemas-upnp-org:service:Layer3Forwarding:1</serviceType><controlURL>/L3F</controlURL>
</service></serviceList><deviceList><device><serviceList><service><serviceType>{service}</serviceType>
<controlURL>/control/wan</controlURL></service></serviceList></device></deviceList></device></root>"""

ANSWER = """<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>
<u:{action}Response xmlns:u="{service}">{values}</u:{action}Response></s:Body></s:Envelope>"""

FAULT = """<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body><s:Fault>
<faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>
<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>{code}</errorCode></UPnPError></detail></s:Fault>
</s:Body></s:Envelope>"""

Respond = Callable[[bytes], list[bytes]]


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, respond: Respond) -> None:
        self._respond = respond

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)  # it does not inherit from that before Python 3.12

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        for answer in self._respond(data):
            self._transport.sendto(answer, address)


@asynccontextmanager
async def datagram_router(respond: Respond) -> AsyncIterator[tuple[str, int]]:
    """A router that answers each datagram with those that `respond` makes of it; yields where it is."""
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Datagrams(respond), local_addr=("127.0.0.1", 0)
    )
    try:
        yield transport.get_extra_info("sockname")
    finally:
        transport.abort()


class PcpRouter:
    """Knows PCP, and keeps its mappings: external ports and their lifetimes by internal port."""

    def __init__(self, external: IPv4Address = EXTERNAL, shift: int = 1000) -> None:
        self.mappings: dict[int, tuple[int, int]] = {}
        self.external = external
        self.shift = shift

    def respond(self, data: bytes) -> list[bytes]:
        if data[0] != 2:
            return [bytes((0, data[1] | 0x80, 0, 1)) + bytes(4)]  # as NAT-PMP says that it is not spoken here
        lifetime, client, nonce, protocol, port, _ = struct.unpack("!4xI16s12sB3xHH16x", data)
        assert client == bytes(10) + b"\xff\xff\x7f\0\0\x01"
        assert protocol == 6
        external_port = port + self.shift if lifetime else 0
        self.mappings[port] = (external_port, lifetime)
        if not lifetime:
            del self.mappings[port]
        header = struct.pack("!BBxBII12x", 2, 0x81, 0, min(lifetime, 120), 7)
        address = bytes(10) + b"\xff\xff" + self.external.packed
        return [header + struct.pack("!12sB3xHH16s", nonce, protocol, port, external_port, address)]


class NatPmpRouter:
    """Knows NAT-PMP, and keeps its mappings: external ports by internal port."""

    def __init__(self, external: IPv4Address = EXTERNAL) -> None:
        self.mappings: dict[int, int] = {}
        self.external = external

    def respond(self, data: bytes) -> list[bytes]:
        if data[0] != 0:
            return [struct.pack("!BBHI", 0, data[1] | 0x80, 1, 7)]
        if data == b"\0\0":
            return [struct.pack("!BBHI4s", 0, 0x80, 0, 7, self.external.packed)]
        version, operation, port, suggested, lifetime = struct.unpack("!BBxxHHI", data)
        assert (version, operation) == (0, 2)
        if lifetime:
            self.mappings[port] = suggested
        else:
            self.mappings.pop(port, None)
        return [struct.pack("!BBHIHHI", 0, 0x82, 0, 7, port, suggested if lifetime else 0, lifetime)]


class UpnpRouter:
    """Knows UPnP. `mappings`: internal client, port and lease by external port. Attributes say what it refuses."""

    def __init__(self, external: str = str(EXTERNAL)) -> None:
        self.external = external
        self.mappings: dict[int, tuple[str, int, int]] = {}
        self.taken: set[int] = set()
        self.only_permanent = False
        self.chunked = False
        self.description = DESCRIPTION.format(device=GATEWAY_DEVICE, service=SERVICE)
        self._where = ("", 0)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[str, int]]:
        """Yields where it answers searches."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._where = server.sockets[0].getsockname()
        async with datagram_router(self.search_reply) as where:
            try:
                yield where
            finally:
                server.close()

    def search_reply(self, data: bytes) -> list[bytes]:
        target = re.search(rb"\nST: (\S+)\r\n", data)
        assert data.startswith(b"M-SEARCH * HTTP/1.1\r\n")
        assert target
        location = "http://{}:{}/root.xml".format(*self._where)
        reply = f"HTTP/1.1 200 OK\r\nST: {target[1].decode()}\r\nUSN: uuid:1\r\nLocation: {location}\r\n\r\n"
        return [b"nonsense", reply.encode()]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"(?i)content-length: (\d+)", head)
            body = (await reader.readexactly(int(length[1]))).decode() if length else ""
            path = head.split(" ")[1]
            status, answer = (200, self.description) if path == "/root.xml" else self._command(head, body)
            self._write(writer, status, answer.encode())
            await writer.drain()
            await reader.read()  # the connection stays open, as some routers' do, until the client has had enough
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _write(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        start = f"HTTP/1.1 {status} X\r\nContent-Type: text/xml\r\n".encode()
        if self.chunked:
            writer.write(start + b"Transfer-Encoding: chunked\r\n\r\n")
            writer.write(b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n")
        else:
            writer.write(start + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def _command(self, head: str, body: str) -> tuple[int, str]:
        action = re.search(r'(?i)soapaction: "(\S+)#(\w+)"', head)
        assert action
        assert action[1] == SERVICE
        values = dict(re.findall(r"<(New\w+)>([^<]*)</\1>", body))
        try:
            answer = getattr(self, f"_{action[2]}")(values)
        except ValueError as error:
            return 500, FAULT.format(code=error.args[0])
        return 200, ANSWER.format(action=action[2], service=SERVICE, values=answer)

    def _GetExternalIPAddress(self, values: dict[str, str]) -> str:  # noqa: N802
        return f"<NewExternalIPAddress>{self.external}</NewExternalIPAddress>"

    def _AddPortMapping(self, values: dict[str, str]) -> str:  # noqa: N802
        external, lease = int(values["NewExternalPort"]), int(values["NewLeaseDuration"])
        if external in self.taken:
            raise ValueError(718)
        if self.only_permanent and lease:
            raise ValueError(725)
        assert values["NewProtocol"] == "TCP"
        self.mappings[external] = (values["NewInternalClient"], int(values["NewInternalPort"]), lease)
        return ""

    def _DeletePortMapping(self, values: dict[str, str]) -> str:  # noqa: N802
        if self.mappings.pop(int(values["NewExternalPort"]), None) is None:
            raise ValueError(714)
        return ""
