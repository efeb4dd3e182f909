"""First contacts of a starting peer: addresses remembered in a file, and a test for a libp2p node at each address.

Addresses come from signed heartbeats. A remembered address is still only a place to try, and proves nothing. libp2p's
daemon tries addresses one after another, for five seconds each; here all are tried at once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Self, TypeVar

from cryptography import x509
from pydantic import BaseModel, Field, ValidationError, model_validator

from peers.errors import SwarmUnreachableError
from peers.network.contacts import is_public
from peers.presence.heartbeat import ADDRESS_LENGTH, Heartbeat, PeerState
from peers.values.identity import is_peer_id, peer_id_of_bytes
from peers.values.manifest import ADDRESS
from peers.values.system import cancel_and_wait, start_task, write_whole

logger = logging.getLogger(__name__)

FORMAT = "diloco-peer remembered peers, version 1"
FILE_NAME = "peers.json"
PEER_LIMIT = 32  # remembered peers, at most; enough that one of them still answers at the next start
ADDRESS_LIMIT = 4  # remembered addresses of one peer, at most
FILE_LIMIT = 256 * 1024  # bytes of the file of peers, at most; 32 peers with four addresses of 256 characters are 40 KB
SAVE_INTERVAL = 60.0  # seconds between two writes of the file of peers, at least
HOUR = 3600  # seconds; two peers last seen within the same hour count as seen at the same time
Seconds = Annotated[int, Field(strict=True, ge=0, lt=10**12)]  # seconds since the epoch
T = TypeVar("T")


class _Known(BaseModel):
    """A remembered peer: its addresses, and when it was first and last seen, in seconds since the epoch."""

    peer: str
    addresses: tuple[str, ...]
    since: Seconds
    seen: Seconds

    @property
    def usefulness(self) -> tuple[bool, int, float]:
        """The sort key of a peer, largest for the most useful: has a public address, seen lately, known for long."""
        return any(map(_is_on_the_internet, self.addresses)), self.seen // HOUR, -self.since

    @model_validator(mode="after")
    def _check_addresses(self) -> Self:
        if self.addresses != _usable(self.peer, self.addresses):
            raise ValueError("the addresses are not the peer's own")
        return self


class _File(BaseModel):
    """The content of the JSON file of a run's remembered peers."""

    format: Annotated[str, Field(pattern=f"^{FORMAT}$")] = FORMAT
    run: str
    peers: Annotated[list[_Known], Field(max_length=PEER_LIMIT)]


class RememberedPeers:
    """The peers of one run that others can dial, in memory and in a file. Times are in seconds since the epoch."""

    def __init__(self, path: Path, run_id: str) -> None:
        """Read the peers from the file at `path`. If it is invalid or of another run, log a warning and ignore it."""
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
            logger.warning("the remembered peers in %s are ignored: %s", path, error)

    def addresses(self) -> tuple[str, ...]:
        """Return the remembered multiaddrs, which end in /p2p/<peer id>; those of the most useful peer come first."""
        ordered = sorted(self._peers.values(), key=lambda known: known.usefulness, reverse=True)
        return tuple(address for known in ordered for address in known.addresses)

    def observe(self, heartbeats: Iterable[Heartbeat], now: float) -> None:
        """Remember the addresses in other peers' heartbeats, and the addresses of nodes that introduce these peers."""
        for beat in heartbeats:
            if beat.state is PeerState.LEAVING:
                continue
            self._see(beat.peer, beat.addresses, now)
            for relay in beat.relays:
                self._see(relay.rstrip("/").rpartition("/p2p/")[2], (relay,), now)
        best = sorted(self._peers.values(), key=lambda known: known.usefulness, reverse=True)[:PEER_LIMIT]
        self._peers = {known.peer: known for known in best}

    def save_when_due(self, now: float) -> None:
        """Write the remembered peers to the file, unless it was written within the last minute."""
        if not self._peers or 0 <= now - self._saved_at < SAVE_INTERVAL:
            return
        self._saved_at = now
        try:
            content = _File(run=self._run_id, peers=list(self._peers.values()))
            write_whole(self._path, [content.model_dump_json(indent=1).encode()], is_durable=True)
        except OSError as error:
            if not self._has_warned:
                logger.warning("addresses of other peers are not saved: %s: %s", self._path, error.strerror or error)
            self._has_warned = True

    def _see(self, peer: str, addresses: Iterable[str], now: float) -> None:
        if usable := _usable(peer, addresses):
            since = self._peers[peer].since if peer in self._peers else int(now)
            self._peers[peer] = _Known(peer=peer, addresses=usable, since=since, seen=int(now))


def _is_on_the_internet(address: str) -> bool:
    kind, host = address.split("/")[1:3]
    return is_public(host) if kind in ("ip4", "ip6") else True


def _usable(peer: str, addresses: Iterable[str]) -> tuple[str, ...]:
    """Return at most four addresses at which this peer can be dialled without a relay, public addresses first."""
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
    """Return the peers in the file of a run's remembered peers. Raises: OSError; ValueError for invalid content."""
    with path.open("rb") as file:
        text = file.read(FILE_LIMIT + 1)
    if len(text) > FILE_LIMIT:
        raise ValueError(f"it has more than {FILE_LIMIT} bytes")
    try:
        content = _File.model_validate_json(text)
    except ValidationError as error:
        raise ValueError("a peer of this version has not written it") from error
    if content.run != run_id:
        raise ValueError("it is of another run")
    return content.peers


ANSWER_SECONDS = 5.0  # seconds to wait for the first node that answers: TCP repeats a lost SYN after 1 and 3 seconds
MORE_SECONDS = 1.0  # seconds to wait for further nodes, once the first has answered
CONTACT_LIMIT = 8  # nodes that a starting peer connects to, at most
GREETING = b"\x13/multistream/1.0.0\n"  # the first bytes that a libp2p node sends on every TCP connection
TLS = b"\x0b/tls/1.0.0\n"  # proposes TLS; a node that agrees answers with the same bytes
KEY_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
"""The extension of a libp2p node's certificate that contains its key."""
PUBLIC_KEY, KEY_BYTES = b"\x08\x01\x12\x20", 32  # prefix of an Ed25519 key in KEY_EXTENSION; the key's length in bytes
KEY_SECONDS = 3.0  # seconds to wait for an answering node to prove its key
TCP = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/(?P<port>\d{1,5})/p2p/[^/]+/?")


async def first_contacts(initial_peers: Sequence[str], remembered: Sequence[str] = ()) -> list[str]:
    """Return the addresses at which a node answers now, at most CONTACT_LIMIT, those of `initial_peers` first.

    If none answers, return `initial_peers`, so that libp2p finds out why. Addresses that are not plain TCP are not
    tried here.
    """
    if not remembered and len(initial_peers) < 2:
        return list(initial_peers)
    candidates = list(dict.fromkeys((*initial_peers, *remembered)))
    answering = await which_answer(candidates)
    logger.debug("%d of %d addresses answer", len(answering), len(candidates))
    untried = {address for address in initial_peers if not endpoint(address)}
    chosen = [address for address in candidates if address in answering | untried]
    return chosen[:CONTACT_LIMIT] or list(initial_peers)


async def reach(start: Callable[[], Awaitable[T]], contacts: Sequence[str]) -> T:
    """Call `start`, which connects to one of the `contacts`, and return its result. If it fails although one of them
    answers, call it once more.

    libp2p's daemon tries only once, for five seconds, and the node or this machine may be busy.

    Raises: SwarmUnreachableError, with the reason for each node; the other exceptions of `start`.
    """
    try:
        return await start()
    except SwarmUnreachableError as error:
        reasons = await asyncio.gather(*map(_why_silent, contacts))
        if all(reasons):
            failures = "; ".join(f"{address}: {reason}" for address, reason in zip(contacts, reasons, strict=True))
            raise SwarmUnreachableError(f"no bootstrap node answered: {failures}.", error.remedy) from error
    logger.info("the first attempt to connect failed, but a bootstrap node answers now: trying once more")
    return await start()


async def _why_silent(address: str) -> str:
    """Return the reason, for users, why the node at an address cannot be reached; empty if the node answers."""
    if (where := endpoint(address)) is None:
        return "no answer"
    peer, (host, port) = address.rstrip("/").rpartition("/")[2], where
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            with closing(writer.transport):
                greeting = await reader.read(len(GREETING))
                if not greeting.startswith(GREETING[:1]):
                    return f"another program than a bootstrap node answers on port {port}; the address has another port"
                key = await _key_shown(reader, writer)
    except TimeoutError:
        return f"no answer from {host}: the machine is off, or a firewall, there or here, lets nothing through"
    except ConnectionRefusedError:
        return f"nothing listens on port {port} of {host}: the node does not run, or has another port"
    except (socket.gaierror, UnicodeError):
        return f"no machine has the name {host}: check its spelling, and that this machine's name server answers"
    except OSError as error:
        return f"no way to {host} ({error.strerror or error}): check this machine's network"
    if key in (None, peer):
        return ""
    return f"another key answers there: {key}. Ask for the node's address of today"


async def _key_shown(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
    """Return the peer id that a libp2p node proves by its TLS certificate; None if the node proves no id."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only the key inside the certificate counts
    context.set_alpn_protocols(["libp2p"])
    try:
        async with asyncio.timeout(KEY_SECONDS):
            writer.write(GREETING + TLS)
            if await reader.readexactly(len(TLS)) != TLS:
                return None
            await writer.start_tls(context)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        certificate = x509.load_der_x509_certificate(shown)
        extension = certificate.extensions.get_extension_for_oid(KEY_EXTENSION).value
    except (OSError, EOFError, ValueError, x509.ExtensionNotFound) as error:
        logger.debug("a node's key is not known: %r", error)
        return None
    assert isinstance(extension, x509.UnrecognizedExtension)
    _, begins, rest = extension.value.partition(PUBLIC_KEY)
    return peer_id_of_bytes(rest[:KEY_BYTES]) if begins and len(rest) >= KEY_BYTES else None


async def which_answer(addresses: Sequence[str]) -> set[str]:
    """Return the addresses at which a libp2p node answers before MORE_SECONDS have passed since the first answer."""
    tasks = [start_task(_answering(address)) for address in addresses]
    found: set[str] = set()
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS) as limit:
                for answer in asyncio.as_completed(tasks):
                    if address := await answer:
                        if not found:
                            soon = asyncio.get_running_loop().time() + MORE_SECONDS
                            limit.reschedule(min(soon, limit.when() or soon))
                        found.add(address)
    finally:
        await cancel_and_wait(*tasks)
    return found


def endpoint(address: str) -> tuple[str, int] | None:
    """Return the host and port of a plain TCP multiaddr; None for any other multiaddr, such as one through a relay."""
    match = TCP.fullmatch(address)
    return (match["host"], int(match["port"])) if match and int(match["port"]) < 65536 else None


async def _answering(address: str) -> str | None:
    if (where := endpoint(address)) is None:
        return None
    with suppress(OSError, asyncio.IncompleteReadError, UnicodeError):  # UnicodeError: the host is an invalid name
        reader, writer = await asyncio.open_connection(*where)
        try:
            return address if await reader.readexactly(len(GREETING)) == GREETING else None
        finally:
            writer.transport.abort()
    return None
