"""Where other peers of a run were last seen, kept in a file: the way back when all bootstrap nodes are gone.

Addresses come from signed heartbeats. What is remembered proves nothing all the same: it is a list of places to knock.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.network.contacts import is_public
from peers.presence.heartbeat import ADDRESS_LENGTH, Heartbeat, PeerState
from peers.values.identity import is_peer_id
from peers.values.manifest import ADDRESS
from peers.values.system import write_whole

logger = logging.getLogger(__name__)

FORMAT = "diloco-peer remembered peers, version 1"
FILE_NAME = "peers.json"
PEER_LIMIT = 32
ADDRESS_LIMIT = 4  # of one peer
FILE_LIMIT = 256 * 1024  # bytes; 32 peers with four addresses of 256 characters are 40 KB
SAVE_INTERVAL = 60.0  # seconds
HOUR = 3600.0


@dataclass
class _Known:
    """A peer, its addresses, and when it was heard of for the first and the last time, in seconds since the epoch."""

    peer: str
    addresses: tuple[str, ...]
    since: float
    seen: float

    @property
    def usefulness(self) -> tuple[bool, int, float]:
        """Sorts the most useful last. Among those seen lately, newcomers never push out peers known for longer."""
        return any(map(_is_on_the_internet, self.addresses)), int(self.seen // HOUR), -self.since


class RememberedPeers:
    """The peers of one run that others can dial, in memory and in a file. Times are seconds since the epoch."""

    def __init__(self, path: Path, run_id: str) -> None:
        """Begin with what the file has. One that can't be read, or is another's, is passed over with a warning."""
        self._path = path
        self._run_id = run_id
        self._peers: dict[str, _Known] = {}
        self._saved_at = -float("inf")
        self._has_warned = False
        try:
            self._peers = {known.peer: known for known in _read(path, run_id)}
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logger.warning("%s is passed over: %s", path, error)

    def addresses(self) -> tuple[str, ...]:
        """Return multiaddrs that end in /p2p/<peer id>, the most useful first."""
        ordered = sorted(self._peers.values(), key=lambda known: known.usefulness, reverse=True)
        return tuple(address for known in ordered for address in known.addresses)

    def observe(self, heartbeats: Iterable[Heartbeat], now: float) -> None:
        """Take in what other peers say of themselves and of the nodes that introduce them."""
        for beat in heartbeats:
            if beat.state is PeerState.LEAVING:
                continue
            self._see(beat.peer, beat.addresses, now)
            for relay in beat.relays:
                self._see(relay.rstrip("/").rpartition("/p2p/")[2], (relay,), now)
        best = sorted(self._peers.values(), key=lambda known: known.usefulness, reverse=True)[:PEER_LIMIT]
        self._peers = {known.peer: known for known in best}

    def save_when_due(self, now: float) -> None:
        """Write the file if it was not written within the last minute."""
        if not self._peers or 0 <= now - self._saved_at < SAVE_INTERVAL:
            return
        self._saved_at = now
        try:
            _write(self._path, self._run_id, self._peers.values())
        except OSError as error:
            if not self._has_warned:
                logger.warning("the addresses of other peers are not kept: %s: %s", self._path, error.strerror or error)
            self._has_warned = True

    def _see(self, peer: str, addresses: Iterable[str], now: float) -> None:
        usable = _usable(peer, addresses)
        if usable:
            since = self._peers[peer].since if peer in self._peers else now
            self._peers[peer] = _Known(peer, usable, since, now)


def _is_on_the_internet(address: str) -> bool:
    """Whether a multiaddr is a public IP address, or a name."""
    kind, host = address.split("/")[1:3]
    return is_public(host) if kind in ("ip4", "ip6") else True


def _usable(peer: str, addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses at which this very peer can be dialled without a relay, public ones first."""
    dialled = [
        address
        for address in addresses
        if len(address) <= ADDRESS_LENGTH
        and ADDRESS.fullmatch(address)
        and address.count("/p2p/") == 1
        and address.endswith(f"/p2p/{peer}")
    ]
    return tuple(sorted(dialled, key=_is_on_the_internet, reverse=True)[:ADDRESS_LIMIT]) if is_peer_id(peer) else ()


def _read(path: Path, run_id: str) -> list[_Known]:
    """Raises: OSError; ValueError for content that we have not written."""
    with path.open("rb") as file:
        text = file.read(FILE_LIMIT + 1)
    if len(text) > FILE_LIMIT:
        raise ValueError(f"it has more than {FILE_LIMIT} bytes")
    try:
        content = json.loads(text)
        if content["format"] != FORMAT or content["run"] != run_id:
            raise ValueError("it is of another run or version")
        return [_known(entry) for entry in content["peers"][:PEER_LIMIT]]
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("it is not what a peer writes") from error


def _known(entry: Any) -> _Known:
    """Raises: ValueError, LookupError, TypeError."""
    peer, addresses, since, seen = (entry[field] for field in ("peer", "addresses", "since", "seen"))
    if not isinstance(peer, str) or any(not isinstance(address, str) for address in addresses):
        raise ValueError("a peer and its addresses are no text")
    usable = _usable(peer, addresses)
    if not usable:
        raise ValueError(f"the addresses of {peer!r:.80} are not its own")
    return _Known(peer, usable, _seconds(since), _seconds(seen))


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value < 1e12:  # neither infinite nor NaN
        raise ValueError(f"{value!r:.80} is no time")
    return float(value)


def _write(path: Path, run_id: str, peers: Iterable[_Known]) -> None:
    """Write the file, whole or not at all. Raises: OSError."""
    entries = [
        {"peer": known.peer, "addresses": known.addresses, "since": int(known.since), "seen": int(known.seen)}
        for known in peers
    ]
    content = json.dumps({"format": FORMAT, "run": run_id, "peers": entries}, indent=1)
    write_whole(path, [content.encode("ascii")], is_durable=True)
