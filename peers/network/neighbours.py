"""Peers in the local network, found by multicast DNS (RFC 6762, RFC 6763).

Any machine in the same network may announce anything. So an address is only used to ask there: a run's id is the digest
of its manifest, and a peer's id that of its key, so that the answering peer proves both.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from ipaddress import ip_address

import psutil
from zeroconf import Error, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from peers.network.first_contact import endpoint
from peers.network.own_network import SOMEWHERE, address_towards
from peers.values.identity import is_peer_id
from peers.values.system import start_task

logger = logging.getLogger(__name__)

SERVICE = "_diloco-peer._tcp.local."
LOOK_SECONDS = 3.0  # seconds to wait for announcements, which take half a second if no packet is lost
MORE_SECONDS = 0.5  # seconds to wait for further announcements, once a peer of the run is found
MOST_HEARD, MOST_ADDRESSES, ASK_SECONDS = 32, 4, 1.0  # limits: peers heard, addresses per peer, seconds for a reply
TEXT_BYTES = 200  # bytes of an announced address, at most: a TXT record's string has at most 255, its key included


def _local_interfaces() -> list[str]:
    """Return this machine's IPv4 addresses in local networks; none if it also has a public address, since it may then
    be in a data centre, whose operators do not want announcements."""
    ours = address_towards(SOMEWHERE[0])
    if ours is not None and ip_address(ours).is_global:
        return []
    found = [one.address for many in psutil.net_if_addrs().values() for one in many if one.family == socket.AF_INET]
    return [address for address in found if ip_address(address).is_private and not ip_address(address).is_loopback]


def _can_be_dialled(address: str) -> bool:
    """Return True for a complete multiaddr in a local network. Other addresses are refused, so that a stranger cannot
    make newcomers dial machines elsewhere."""
    host, port = endpoint(address) or ("", 0)
    with suppress(ValueError):
        return ip_address(host).is_private and port > 0 and is_peer_id(address.rpartition("/")[2])
    return False


@asynccontextmanager
async def announced(peer: str, run: str, addresses: Sequence[str]) -> AsyncIterator[None]:
    """Announce a peer and its run in the local network during the body. An empty `run`: the peer is a bootstrap node.

    `addresses` are multiaddrs; the first few are announced.
    """
    info, interfaces = _service(peer, run, addresses), _local_interfaces()
    async with AsyncExitStack() as stack:
        if info is not None and interfaces:
            announcing = start_task(_announce(info, interfaces, stack))
            stack.callback(announcing.cancel)
        yield


async def _announce(info: AsyncServiceInfo, interfaces: list[str], stack: AsyncExitStack) -> None:
    """Announce a service by multicast DNS until `stack` is closed. A failure is logged, and no error is raised."""
    try:
        announcer = AsyncZeroconf(interfaces=interfaces)
        stack.push_async_callback(announcer.async_close)  # closing withdraws the announcement
        await (await announcer.async_register_service(info, allow_name_change=True))
        logger.info("this machine is announced in the local network: `diloco-peer join --run` finds the run there")
    except (OSError, Error) as error:
        logger.info("this machine cannot be announced in the local network: %s", error)


def _service(peer: str, run: str, addresses: Sequence[str]) -> AsyncServiceInfo | None:
    """Return the DNS service that announces a peer, its run and its addresses; None if no address can be dialled."""
    dialable = [address for address in addresses if _can_be_dialled(address) and len(address) <= TEXT_BYTES]
    if not dialable:
        return None
    text = {"run": run} | {f"a{number}": address for number, address in enumerate(dialable[:MOST_ADDRESSES])}
    _, _, ip, _, port, *_ = dialable[0].split("/")
    host = f"{peer[-16:]}.local."
    return AsyncServiceInfo(
        SERVICE, f"{peer}.{SERVICE}", parsed_addresses=[ip], port=int(port), properties=text, server=host
    )


async def neighbours(run: str) -> tuple[str, ...]:
    """Return multiaddrs announced in the local network: of the run's peers, then of bootstrap nodes."""
    if not (interfaces := _local_interfaces()):
        return ()
    try:
        listener = AsyncZeroconf(interfaces=interfaces)
    except OSError as error:
        logger.info("cannot listen for peers in the local network: %s", error)
        return ()
    texts: dict[str, dict[str, str]] = {}  # TXT records by service name
    is_found = asyncio.Event()
    asking = list[asyncio.Task[None]]()

    async def ask(name: str) -> None:
        info = AsyncServiceInfo(SERVICE, name)
        if await info.async_request(listener.zeroconf, 1000 * ASK_SECONDS):
            texts[name] = {key: value or "" for key, value in info.decoded_properties.items()}
            if texts[name].get("run") == run:
                is_found.set()

    def on_service(zeroconf: Zeroconf, service_type: str, name: str, state_change: object) -> None:
        if len(texts) < MOST_HEARD and name not in texts:
            texts[name] = {}
            asking.append(start_task(ask(name)))

    async with listener, AsyncServiceBrowser(listener.zeroconf, SERVICE, handlers=[on_service]):
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await is_found.wait()
                await asyncio.sleep(MORE_SECONDS)
        except TimeoutError:
            pass
        finally:
            for task in asking:
                task.cancel()
    useful = [text for wanted in (run, "") for text in texts.values() if text.get("run") == wanted]
    found = [text.get(f"a{number}", "") for text in useful for number in range(MOST_ADDRESSES)]
    return tuple(dict.fromkeys(filter(_can_be_dialled, found)))
