"""PCP's and NAT-PMP's messages: byte for byte as the RFCs draw them, and nothing else is believed."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

from hypothesis import given
from hypothesis import strategies as st

from peers.network.gateway import (
    NAT_PMP_ADDRESS_REQUEST,
    Mapping,
    _pack_nat_pmp_map,
    _pack_pcp_map,
    _read_nat_pmp_address,
    _read_nat_pmp_map,
    _read_pcp_map,
)

EXTERNAL = IPv4Address("11.77.0.9")
NONCE = bytes(range(12))
PORT = 0x1234
CLIENT = IPv4Address("192.168.3.2")
MAPPED_CLIENT = bytes.fromhex("00000000000000000000ffffc0a80302")
ANSWER_START = bytes.fromhex("02810000 00000078 00000007") + bytes(12)
ANSWER_END = NONCE + bytes.fromhex("06000000 1234 5678 00000000000000000000ffff0b4d0009")
PCP_ANSWER = ANSWER_START + ANSWER_END
NAT_PMP_ANSWER = bytes.fromhex("00820000 00000007 1234 5678 00000e10")
ADDRESS_ANSWER = bytes.fromhex("00800000 00000007 0b4d0009")


def test_requests_are_laid_out_as_the_rfcs_say() -> None:
    header = bytes.fromhex("02010000 00000e10") + MAPPED_CLIENT
    mapping = NONCE + bytes.fromhex("06000000 1234 1234 00000000000000000000ffff00000000")
    assert _pack_pcp_map(NONCE, CLIENT, PORT, 3600, PORT) == header + mapping
    assert NAT_PMP_ADDRESS_REQUEST == b"\0\0"
    assert _pack_nat_pmp_map(PORT, 3600, PORT) == bytes.fromhex("0002 0000 1234 1234 00000e10")


def test_an_ipv6_client_asks_for_any_ipv6_address() -> None:
    client = IPv6Address("2001:db8::2")
    packed = _pack_pcp_map(NONCE, client, PORT, 3600, PORT)
    assert (packed[8:24], packed[44:]) == (client.packed, bytes(16))


def test_answers_are_read() -> None:
    assert _read_pcp_map(PCP_ANSWER, NONCE, PORT) == Mapping(EXTERNAL, 0x5678, 120)
    assert _read_nat_pmp_map(NAT_PMP_ANSWER, PORT, EXTERNAL) == Mapping(EXTERNAL, 0x5678, 3600)
    assert _read_nat_pmp_address(ADDRESS_ANSWER) == EXTERNAL


def test_refusals_are_read() -> None:
    refused = ANSWER_START[:3] + b"\x08" + ANSWER_START[4:]
    assert _read_pcp_map(refused + ANSWER_END, NONCE, PORT) == 8
    assert _read_pcp_map(bytes.fromhex("0081 0001 00000007"), NONCE, PORT) == 1
    assert _read_nat_pmp_map(bytes.fromhex("0082 0002 00000007"), PORT, EXTERNAL) == 2
    assert _read_nat_pmp_address(bytes.fromhex("0080 0003 00000007 00000000")) == 3


def test_answers_to_somebody_else_are_none() -> None:
    assert _read_pcp_map(PCP_ANSWER, NONCE[::-1], PORT) is None
    assert _read_pcp_map(PCP_ANSWER, NONCE, PORT + 1) is None
    assert _read_nat_pmp_map(NAT_PMP_ANSWER, PORT + 1, EXTERNAL) is None
    assert _read_nat_pmp_map(ADDRESS_ANSWER, PORT, EXTERNAL) is None
    assert _read_nat_pmp_address(NAT_PMP_ANSWER) is None


def test_requests_are_no_answers() -> None:
    assert _read_pcp_map(_pack_pcp_map(NONCE, CLIENT, PORT, 3600, PORT), NONCE, PORT) is None
    assert _read_nat_pmp_map(_pack_nat_pmp_map(PORT, 3600, PORT), PORT, EXTERNAL) is None


def test_a_mapping_to_port_0_is_none() -> None:
    assert _read_pcp_map(PCP_ANSWER[:42] + b"\0\0" + PCP_ANSWER[44:], NONCE, PORT) is None
    assert _read_nat_pmp_map(NAT_PMP_ANSWER[:10] + b"\0\0" + NAT_PMP_ANSWER[12:], PORT, EXTERNAL) is None


@given(st.data())
def test_whatever_arrives_is_read_or_ignored(data: st.DataObject) -> None:
    """Answers with some bytes replaced, cut short or prolonged."""
    base = data.draw(st.sampled_from((PCP_ANSWER, NAT_PMP_ANSWER, ADDRESS_ANSWER, b"")))
    damaged = bytearray(base[: data.draw(st.integers(0, len(base)))] + data.draw(st.binary(max_size=1200)))
    for place in data.draw(st.lists(st.integers(0, max(len(damaged) - 1, 0)), max_size=4)):
        if damaged:
            damaged[place] = data.draw(st.integers(0, 255))
    answer = _read_pcp_map(bytes(damaged), NONCE, PORT) or _read_nat_pmp_map(bytes(damaged), PORT, EXTERNAL)
    assert answer is None or isinstance(answer, int) or (answer.port and 0 <= answer.lifetime < 1 << 32)
    _read_nat_pmp_address(bytes(damaged))
