"""What libp2p's daemon is started with, and that the work that ends it is done whole, whatever cancels it."""

from __future__ import annotations

import asyncio

import pytest

from peers.errors import ManifestError, OwnAddressError
from peers.network import transport
from peers.network.daemon import _uninterrupted, parse_addresses, unreachable
from peers.network.transport import HivemindTransport
from peers.values.identity import Identity
from tests.peers.network.test_throttle import simulate


def test_a_cancellation_is_raised_once_the_work_is_done() -> None:
    async def story() -> None:
        began, may_end, done = asyncio.Event(), asyncio.Event(), list[str]()

        async def work() -> None:
            began.set()
            await may_end.wait()
            done.append("all of it")

        task = asyncio.create_task(_uninterrupted(work()))
        await began.wait()
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == ["all of it"]

    simulate(story())


def test_who_holds_a_run_alone_learns_how_to_replace_its_node() -> None:
    remedy = unreachable(["/ip4/192.0.2.1/tcp/1"]).remedy
    assert "--initial-peer. If there is none, start `diloco-peer bootstrap`" in remedy


def test_an_address_that_is_cut_off_points_at_the_invite() -> None:
    address = f"/ip4/192.0.2.1/tcp/1/p2p/{Identity.generate().peer_id}"
    assert parse_addresses([address], needs_peer_id=True)
    with pytest.raises(ManifestError, match="the invite may be cut off: copy it whole"):
        parse_addresses([address[:-1]], needs_peer_id=True)


@pytest.mark.parametrize("end", ["", "/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"])
def test_an_address_without_a_nodes_peer_id_is_said_to_lack_it(end: str) -> None:
    """Regression: it was said to be no multiaddress."""
    with pytest.raises(ManifestError, match=r"tcp/1.*' lacks the node's peer id, /p2p/12D3KooW…, at its end\."):
        parse_addresses([f"/ip4/192.0.2.1/tcp/1{end}"], needs_peer_id=True)
    with pytest.raises(ManifestError, match=r"'example\.org' is not a multiaddress"):
        parse_addresses(["example.org"], needs_peer_id=True)


def test_a_silent_node_can_be_replaced_in_an_invite_or_on_the_command_line() -> None:
    """`DiLoCo` has the invite only."""
    assert "in the invite after @ or with --initial-peer" in unreachable(["/ip4/192.0.2.1/tcp/1"]).remedy


def test_work_that_fails_says_so() -> None:
    async def fail() -> None:
        raise OSError("no daemon")

    async def story() -> None:
        await _uninterrupted(asyncio.sleep(0))
        with pytest.raises(OSError, match="no daemon"):
            await _uninterrupted(fail())

    simulate(story())


@pytest.mark.parametrize("option", ["listen", "announce"])
def test_an_own_address_may_end_in_the_own_peer_id_and_in_no_other(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the address that a node prints, pasted into --announce, was printed with its id twice; another node's
    id and a missing port passed."""
    me, other = Identity.generate(), Identity.generate()
    seen = list[str]()

    async def start_daemon(
        identity: Identity, contacts: object, listen: list[str], announce: list[str], *_: object
    ) -> None:
        seen.extend(listen if option == "listen" else announce)
        raise EOFError

    monkeypatch.setattr(transport, "start_daemon", start_daemon)

    def create(*addresses: str) -> None:
        asyncio.run(HivemindTransport.create(me, **{option: addresses}))  # type: ignore[arg-type]

    place = "/dns4/bootstrap.example.org/tcp/31337"
    relay = f"{place}/p2p/{other.peer_id}/p2p-circuit"
    with pytest.raises(EOFError):
        create(place, f"{place}/p2p/{me.peer_id}", f"{place}/p2p/{me.peer_id}/p2p/{me.peer_id}/", relay)
    assert seen == [place, place, place, relay]
    cases = [
        (f"{place}/p2p/{other.peer_id}", "has another node's peer id"),
        ("/dns4/bootstrap.example.org", "has no TCP or QUIC port"),
        ("/ip4/192.0.2.1/udp/31337", "has no TCP or QUIC port"),
        ("example.org", "is not a multiaddress"),
    ]
    for wrong, said in cases:
        with pytest.raises(OwnAddressError, match=said) as refused:
            create(wrong)
        assert refused.value.exit_code == 2
