"""Addresses of other peers outlive a restart; what is no such file, or says what no peer says, is passed over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.network.first_contact import FILE_LIMIT, HOUR, PEER_LIMIT, SAVE_INTERVAL, RememberedPeers
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.values.identity import Identity
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG, RUN

NOW = 1_800_000_000.0
ALICE, BOB, RELAY = (Identity.generate().peer_id for _ in range(3))
MANY = [Identity.generate().peer_id for _ in range(PEER_LIMIT + 8)]


def address(peer: str, host: str = "11.77.0.9") -> str:
    return f"/ip4/{host}/tcp/31337/p2p/{peer}"


def seen(peer: str, *addresses: str, **changes: Any) -> Heartbeat:
    return beat(peer, LOG).model_copy(update={"addresses": addresses, **changes})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "peers.json"


def test_they_outlive_a_restart(path: Path) -> None:
    remembered = RememberedPeers(path, RUN)
    assert remembered.addresses() == ()
    remembered.observe([seen(ALICE, address(ALICE), relays=(address(RELAY),))], NOW)
    remembered.save_when_due(NOW)
    again = RememberedPeers(path, RUN)
    assert set(again.addresses()) == set(remembered.addresses()) == {address(ALICE), address(RELAY)}


def test_only_what_can_be_dialled_is_kept(path: Path) -> None:
    remembered = RememberedPeers(path, RUN)
    circuit = f"{address(RELAY)}/p2p-circuit/p2p/{ALICE}"
    remembered.observe([seen(ALICE, circuit, address(BOB), "/ip4/11.77.0.9/tcp/1"), seen(BOB)], NOW)
    remembered.observe([seen(RELAY, address(RELAY), state=PeerState.LEAVING)], NOW)
    assert remembered.addresses() == ()


def test_public_addresses_come_first(path: Path) -> None:
    remembered = RememberedPeers(path, RUN)
    private = address(ALICE, "192.168.3.2")
    remembered.observe([seen(ALICE, private, address(ALICE)), seen(BOB, address(BOB, "10.0.0.1"))], NOW)
    remembered.observe([seen(RELAY, address(RELAY))], NOW + 1)
    assert remembered.addresses() == (address(ALICE), private, address(RELAY), address(BOB, "10.0.0.1"))


def test_newer_addresses_replace_older_ones(path: Path) -> None:
    remembered = RememberedPeers(path, RUN)
    remembered.observe([seen(ALICE, address(ALICE))], NOW)
    remembered.observe([seen(ALICE, address(ALICE, "11.77.0.10"))], NOW + 1)
    assert remembered.addresses() == (address(ALICE, "11.77.0.10"),)


def test_a_crowd_of_newcomers_does_not_push_out_the_known(path: Path) -> None:
    """So that nobody can make a peer forget all others by inventing many."""
    remembered = RememberedPeers(path, RUN)
    old, *new = [seen(peer, address(peer)) for peer in MANY]
    remembered.observe([old], NOW)
    remembered.observe([old, *new], NOW + 10)
    assert len(remembered.addresses()) == PEER_LIMIT
    assert old.addresses[0] in remembered.addresses()
    remembered.observe(new[:PEER_LIMIT], NOW + 3 * HOUR)  # those not seen for hours make room
    assert old.addresses[0] not in remembered.addresses()


def test_the_file_is_written_once_a_minute(path: Path) -> None:
    remembered = RememberedPeers(path, RUN)
    remembered.save_when_due(NOW)
    assert not path.exists()  # there is nothing to remember yet
    remembered.observe([seen(ALICE, address(ALICE))], NOW)
    remembered.save_when_due(NOW)
    remembered.observe([seen(BOB, address(BOB))], NOW + 1)
    remembered.save_when_due(NOW + SAVE_INTERVAL - 1)
    assert BOB not in path.read_text()
    remembered.save_when_due(NOW + SAVE_INTERVAL)
    assert BOB in path.read_text()
    remembered.observe([seen(RELAY, address(RELAY))], NOW)
    remembered.save_when_due(NOW - HOUR)  # the clock was set back
    assert RELAY in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == ["peers.json"]


def test_a_folder_that_is_gone_is_said_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    remembered = RememberedPeers(path.parent / "gone" / "peers.json", RUN)
    remembered.observe([seen(ALICE, address(ALICE))], NOW)
    for minute in range(3):
        remembered.save_when_due(NOW + minute * SAVE_INTERVAL)
    assert len(caplog.records) == 1


def change(field: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["peers"][0].update({field: value})


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.update(run="other-" + "a" * 32),
        lambda content: content.update(format="diloco-peer remembered peers, version 2"),
        lambda content: content.update(peers={"a": 1}),
        lambda content: content.update(peers=[[]]),
        lambda content: content.pop("peers"),
        change("peer", BOB),
        change("peer", 7),
        change("peer", ["x"]),
        change("addresses", [address(BOB)]),
        change("addresses", [7]),
        change("addresses", 7),
        change("addresses", ["/ip4/1.2.3.4/tcp/1/p2p/../../etc"]),
        change("seen", "yesterday"),
        change("seen", float("nan")),
        change("since", -1),
        change("since", 1e300),
    ],
)
def test_what_we_have_not_written_is_passed_over(
    damage: Callable[[dict[str, Any]], object], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remembered = RememberedPeers(path, RUN)
    remembered.observe([seen(ALICE, address(ALICE))], NOW)
    remembered.save_when_due(NOW)
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    assert RememberedPeers(path, RUN).addresses() == ()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("text", [b"", b"\xff", b"[]", b"7", b"{", b"[" * 100_000, b" " * (FILE_LIMIT + 1)])
def test_a_file_that_is_none_is_passed_over(text: bytes, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(text)
    assert RememberedPeers(path, RUN).addresses() == ()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_folder_in_its_place_is_passed_over(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.mkdir()
    assert RememberedPeers(path, RUN).addresses() == ()
    assert "Is a directory" in caplog.text


@given(st.lists(st.text(alphabet="/ip4tc:.0129px" + ALICE[:3], max_size=40) | st.just(address(ALICE)), max_size=9))
def test_whatever_addresses_a_peer_claims_its_own_are_kept(addresses: list[str]) -> None:
    remembered = RememberedPeers(Path("/nonexistent/peers.json"), RUN)
    remembered.observe([seen(ALICE, *addresses)], NOW)
    kept = remembered.addresses()
    assert (address(ALICE) in kept) == (address(ALICE) in addresses)
    assert all(place.endswith(f"/p2p/{ALICE}") for place in kept)
