"""Which of many addresses lead to a libp2p node now. libp2p's daemon tries one after the other, and gives each of those
that nobody answers at five seconds; we ask all of them at once."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from peers.errors import SwarmUnreachableError

T = TypeVar("T")

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
MORE_SECONDS = 1.0  # for the others, once one has answered
CONTACT_LIMIT = 8  # nodes that a peer begins with
GREETING = b"\x13/multistream/1.0.0\n"
"""How every libp2p node begins on every TCP connection."""
TCP = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/(?P<port>\d{1,5})/p2p/[^/]+/?")


async def first_contacts(initial_peers: Sequence[str], remembered: Sequence[str] = ()) -> list[str]:
    """Return the addresses to begin with: those at which a node answers now, the ones that were given first.

    Where none answers at all, these are the given ones, for libp2p to find out why. Addresses that are not plain TCP
    are not tried here.
    """
    if not remembered and len(initial_peers) < 2:
        return list(initial_peers)
    candidates = list(dict.fromkeys((*initial_peers, *remembered)))
    answering = await which_answer(candidates)
    chosen = [
        address
        for address in candidates
        if address in answering or (address in initial_peers and not endpoint(address))
    ]
    logger.debug("%d of %d addresses answer", len(answering), len(candidates))
    return chosen[:CONTACT_LIMIT] or list(initial_peers)


async def reach(start: Callable[[], Awaitable[T]], contacts: Sequence[str]) -> T:
    """Start what needs to reach one of these nodes, and once more if it does not, though a node answers: libp2p's
    daemon has but one try, of five seconds, and the node or this machine may be busy.

    Raises: SwarmUnreachableError, and whatever `start` raises.
    """
    try:
        return await start()
    except SwarmUnreachableError:
        if not await which_answer(contacts):
            raise
    logger.info("a bootstrap node answers, but was not reached in time: trying once more")
    return await start()


async def which_answer(addresses: Sequence[str]) -> set[str]:
    """Return the addresses at which a libp2p node answers, when all that answer soon have done so."""
    tasks = {
        asyncio.create_task(_answers(*where)): address
        for address in addresses
        if (where := endpoint(address)) is not None
    }
    answering: set[str] = set()
    pending = set(tasks)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + ANSWER_SECONDS
    try:
        while pending and loop.time() < deadline:
            done, pending = await asyncio.wait(
                pending, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED
            )
            found = {tasks[task] for task in done if task.result()}
            if found and not answering:
                deadline = min(deadline, loop.time() + MORE_SECONDS)
            answering |= found
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return answering


def endpoint(address: str) -> tuple[str, int] | None:
    """Return host and port of a multiaddr that is plain TCP; None for others, such as a relay's circuits."""
    match = TCP.fullmatch(address)
    return (match["host"], int(match["port"])) if match and int(match["port"]) < 65536 else None


async def _answers(host: str, port: int) -> bool:
    with suppress(OSError, asyncio.IncompleteReadError, UnicodeError):  # a host's name may be none
        reader, writer = await asyncio.open_connection(host, port)
        try:
            return await reader.readexactly(len(GREETING)) == GREETING
        finally:
            writer.transport.abort()
    return False
