"""UPnP's messages: what a device on the local network says is checked, and leads nowhere but to that device."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.network.upnp import (
    _command_message,
    _read_command_answer,
    _read_description,
    _read_elements,
    _read_search_reply,
    _search_message,
    _Service,
    _UpnpError,
)
from tests.peers.network.fake_routers import ANSWER, DESCRIPTION, FAULT, GATEWAY_DEVICE, SERVICE

ROUTER = "192.168.3.1"
LOCATION = urlsplit(f"http://{ROUTER}:5000/root.xml")
REPLY = "HTTP/1.1 200 OK\r\nCache-Control: max-age=120\r\nst: {target}\r\nLOCATION:{location}\r\nEXT:\r\n\r\n"


def reply(location: str, target: str = GATEWAY_DEVICE) -> bytes:
    return REPLY.format(target=target, location=location).encode()


def test_a_search_is_laid_out_as_the_standard_says() -> None:
    lines = _search_message(GATEWAY_DEVICE).split(b"\r\n")
    assert lines[0] == b"M-SEARCH * HTTP/1.1"
    assert {b'MAN: "ssdp:discover"', b"MX: 2", f"ST: {GATEWAY_DEVICE}".encode()} < set(lines)
    assert lines[-2:] == [b"", b""]


def test_a_reply_says_where_the_description_is() -> None:
    assert _read_search_reply(reply(LOCATION.geturl()), ROUTER) == LOCATION


@pytest.mark.parametrize(
    "location",
    [
        "http://192.168.3.77:5000/root.xml",
        "http://127.0.0.1:631/",
        "http://metadata.internal/",
        "https://192.168.3.1/",
        "file:///etc/passwd",
        "http://192.168.3.1:99999/",
        "http://user@192.168.3.1/",
        "http://192.168.3.1/a b",
        "http://192.168.3.1/" + "a" * 600,
        "http://[192.168.3.1/",
        "",
    ],
)
def test_a_device_is_talked_to_at_its_own_address_alone(location: str) -> None:
    assert _read_search_reply(reply(location), ROUTER) is None
    if location:  # without one, commands go where the description came from
        description = DESCRIPTION.format(device=GATEWAY_DEVICE, service=SERVICE).replace("/control/wan", location)
        assert _read_description(description.encode(), LOCATION) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        reply(LOCATION.geturl(), "upnp:rootdevice"),
        reply(LOCATION.geturl()).replace(b" 200 ", b" 404 "),
        reply(LOCATION.geturl()) + bytes(5000),
    ],
)
def test_other_devices_are_passed_over(data: bytes) -> None:
    assert _read_search_reply(data, ROUTER) is None


def test_the_service_is_found_deep_in_the_description() -> None:
    [service] = _read_description(DESCRIPTION.format(device=GATEWAY_DEVICE, service=SERVICE).encode(), LOCATION)
    assert service == _Service(SERVICE, urlsplit(f"http://{ROUTER}:5000/control/wan"))
    assert _read_description(DESCRIPTION.format(device=GATEWAY_DEVICE, service="other").encode(), LOCATION) == []


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize(
    "bomb", ['<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">', '<!ENTITY b SYSTEM "file:///etc/passwd">']
)
def test_entities_are_not_defined(bomb: str, encoding: str) -> None:
    """Neither the kind that blows up nor the kind that reads files."""
    with pytest.raises(_UpnpError, match="document type"):
        _read_elements(f'<?xml version="1.0"?><!DOCTYPE x [{bomb}]><x>&b;</x>'.encode(encoding))


def test_a_tower_of_elements_does_no_harm() -> None:
    assert len(_read_elements(b"<a>" * 18_000 + b"</a>" * 18_000)) == 18_000  # as many as an answer may have
    with pytest.raises(_UpnpError):
        _read_elements(b"<a>" * 100_000)


@pytest.mark.parametrize("text", ["", "<a>", "<a></b>", "<a/><a/>", "&x;", "<a>\0</a>", "<a>\ud800</a>"])
def test_what_is_no_xml_is_nonsense(text: str) -> None:
    with pytest.raises(_UpnpError):
        _read_elements(text.encode(errors="surrogatepass"))


def test_commands_and_their_answers() -> None:
    service = _Service(SERVICE, LOCATION)
    body = _command_message(service, "GetExternalIPAddress", {"NewA": "1"}).decode()
    assert f'<u:GetExternalIPAddress xmlns:u="{SERVICE}"><NewA>1</NewA></u:GetExternalIPAddress>' in body
    values = "<NewExternalIPAddress> 11.77.0.9 </NewExternalIPAddress>"
    answer = ANSWER.format(action="GetExternalIPAddress", service=SERVICE, values=values).encode()
    assert _read_command_answer(answer, "GetExternalIPAddress", 200) == {"NewExternalIPAddress": "11.77.0.9"}
    with pytest.raises(_UpnpError, match="no AddPortMappingResponse"):
        _read_command_answer(answer, "AddPortMapping", 200)
    with pytest.raises(_UpnpError, match="status 500"):
        _read_command_answer(answer, "GetExternalIPAddress", 500)


@pytest.mark.parametrize("code", ["718", "", "9" * 5000])
def test_refusals_have_a_code(code: str) -> None:
    with pytest.raises(_UpnpError) as caught:
        _read_command_answer(FAULT.format(code=code).encode(), "AddPortMapping", 500)
    assert caught.value.code == code


PIECES = st.sampled_from(
    ("<a>", "</a>", "<service>", "</service>", f"<serviceType>{SERVICE}</serviceType>", "<controlURL>/</controlURL>")
)


@given(st.lists(PIECES | st.text(max_size=8), max_size=12).map("".join))
def test_whatever_a_device_sends_is_read_or_refused(text: str) -> None:
    for read in (
        lambda data: _read_description(data, LOCATION),
        lambda data: _read_command_answer(data, "AddPortMapping", 200),
        lambda data: _read_search_reply(data, ROUTER),
    ):
        try:
            read(text.encode(errors="replace"))
        except _UpnpError:
            continue
