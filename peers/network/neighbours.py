"""Peers in the local network, as they announce themselves there: by multicast DNS (RFC 6762, RFC 6763).

Anybody in the same network may say anything. An address is only where to ask: a run's id is the digest of its manifest,
and a peer's id that of its key, so that whoever answers shows what it is.
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
LOOK_SECONDS = 3.0  # for which neighbours are listened for; they answer within half a second, if no packet is lost
MORE_SECONDS = 0.5  # once one of the run is found
MOST_HEARD, MOST_ADDRESSES, ASK_SECONDS = 32, 4, 1.0  # peers; addresses of one; for what one announces of itself
TEXT_BYTES = 200  # a TXT record's string has up to 255, the key included


def _local_interfaces() -> list[str]:
    """Return this machine's addresses in local networks. Where it has a public one it says nothing in any: it may be in
    a data centre, whose operators do not want to hear of it."""
    ours = address_towards(SOMEWHERE[0])
    if ours is not None and ip_address(ours).is_global:
        return []
    found = [one.address for many in psutil.net_if_addrs().values() for one in many if one.family == socket.AF_INET]
    return [address for address in found if ip_address(address).is_private and not ip_address(address).is_loopback]


def _can_be_dialled(address: str) -> bool:
    """Return whether this is a whole address in a local network: a stranger could have newcomers dial others."""
    host, port = endpoint(address) or ("", 0)
    with suppress(ValueError):
        return ip_address(host).is_private and port > 0 and is_peer_id(address.rpartition("/")[2])
    return False


@asynccontextmanager
async def announced(peer: str, run: str, addresses: Sequence[str]) -> AsyncIterator[None]:
    """Say meanwhile in the local network where a peer is, and in which run; an empty one: it helps those of any run.

    `addresses` are multiaddrs, of which the first few are told.
    """
    info, interfaces = _service(peer, run, addresses), _local_interfaces()
    async with AsyncExitStack() as stack:
        if info is not None and interfaces:
            saying = start_task(_say(info, interfaces, stack))
            stack.callback(saying.cancel)
        yield


async def _say(info: AsyncServiceInfo, interfaces: list[str], stack: AsyncExitStack) -> None:
    """Announce a service until the stack is unwound. Peers of the run do not wait for it, so a failure is no error."""
    try:
        voice = AsyncZeroconf(interfaces=interfaces)
        stack.push_async_callback(voice.async_close)  # which says goodbye
        await (await voice.async_register_service(info, allow_name_change=True))
        logger.info("the local network hears of this machine: `diloco-peer join --run` alone finds the run there")
    except (OSError, Error) as error:
        logger.info("the local network does not hear of this machine: %s", error)


def _service(peer: str, run: str, addresses: Sequence[str]) -> AsyncServiceInfo | None:
    """Return what to say; None where there is nothing to dial."""
    told = [address for address in addresses if _can_be_dialled(address) and len(address) <= TEXT_BYTES]
    if not told:
        return None
    text = {"run": run} | {f"a{number}": address for number, address in enumerate(told[:MOST_ADDRESSES])}
    _, _, ip, _, port, *_ = told[0].split("/")
    host = f"{peer[-16:]}.local."
    return AsyncServiceInfo(
        SERVICE, f"{peer}.{SERVICE}", parsed_addresses=[ip], port=int(port), properties=text, server=host
    )


async def neighbours(run: str) -> tuple[str, ...]:
    """Return addresses of those who say in the local network that they are in a run, then of those that help any."""
    if not (interfaces := _local_interfaces()):
        return ()
    try:
        ear = AsyncZeroconf(interfaces=interfaces)
    except OSError as error:
        logger.info("nothing is heard in the local network: %s", error)
        return ()
    texts: dict[str, dict[str, str]] = {}  # by the service's name
    is_found = asyncio.Event()
    asking = list[asyncio.Task[None]]()

    async def ask(name: str) -> None:
        info = AsyncServiceInfo(SERVICE, name)
        if await info.async_request(ear.zeroconf, 1000 * ASK_SECONDS):
            texts[name] = {key: value or "" for key, value in info.decoded_properties.items()}
            if texts[name].get("run") == run:
                is_found.set()

    def hear(zeroconf: Zeroconf, service_type: str, name: str, state_change: object) -> None:
        if len(texts) < MOST_HEARD and name not in texts:
            texts[name] = {}
            asking.append(start_task(ask(name)))

    async with ear, AsyncServiceBrowser(ear.zeroconf, SERVICE, handlers=[hear]):
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
    said = [text.get(f"a{number}", "") for text in useful for number in range(MOST_ADDRESSES)]
    return tuple(dict.fromkeys(filter(_can_be_dialled, said)))
