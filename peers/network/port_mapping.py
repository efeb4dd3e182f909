"""A TCP port that the home router forwards to this peer, requested and renewed in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from peers.network.gateway import Gateway, Mapping
from peers.network.upnp import Upnp

logger = logging.getLogger(__name__)

LIFETIME = 3600.0  # seconds of a mapping that we request; if this process dies, the router keeps it that long
RENEWAL = 600.0  # seconds, at most, until we renew a mapping, since a restarted router has lost it
SHORTEST_RENEWAL = 30.0  # seconds, at least, until we renew a mapping, however short its lifetime
LOOK_AGAIN = 1800.0  # seconds between two searches for a router that maps ports
CLOSING_SECONDS = 2.0  # seconds for a router to end the mapping, which otherwise ends with its lifetime


class PortMapper:
    """A mapper of one TCP port of ours: the home router forwards the port while `run` runs. `endpoint` is the router's
    address and port, at which others can dial us; None without a mapping."""

    def __init__(self, port: int, routers: Sequence[Gateway | Upnp] = ()) -> None:
        """Create the mapper of our TCP `port`; `routers` are clients of the home router, one for each protocol."""
        self._port = port
        self._routers = routers or (Gateway(), Upnp())
        self._router: Gateway | Upnp | None = None
        self._wakeup = asyncio.Event()
        self.endpoint: str | None = None

    def look_again(self) -> None:
        """Make `run` ask the router for the mapping at once, after sleep or a change of the network."""
        self._wakeup.set()

    async def run(self) -> None:
        """Map the port, and renew the mapping until cancelled; then end the mapping. Failures are only logged."""
        try:
            while True:
                self._wakeup.clear()
                mapping = await self._map()
                self.endpoint = None if mapping is None else mapping.endpoint
                with suppress(TimeoutError):
                    async with asyncio.timeout(_renewal_after(mapping)):
                        await self._wakeup.wait()
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSING_SECONDS):
                    await self._unmap()

    async def _map(self) -> Mapping | None:
        """Return the first usable mapping; None if there is none. The last mapping's protocol is tried first."""
        for router in sorted(self._routers, key=lambda router: router is not self._router):
            try:
                mapping = await router.open(self._port, LIFETIME)
            except OSError as error:
                logger.debug("no port by %s: %r", router.name, error)
                continue
            if mapping is None:
                continue
            if router is not self._router:
                await self._unmap()
                self._router = router
            if mapping.address.is_global:
                logger.debug("%s maps %s to port %d", router.name, mapping.endpoint, self._port)
                return mapping
            logger.debug("%s maps a port of %s, which is behind another NAT", router.name, mapping.address)
            await self._unmap()
        return None

    async def _unmap(self) -> None:
        router, self._router = self._router, None
        if router is not None:
            try:
                await router.close(self._port)
            except OSError as error:
                logger.debug("the mapping by %s is not ended: %r", router.name, error)


def _renewal_after(mapping: Mapping | None) -> float:
    """Return the seconds until the router is asked again. They are half of the mapping's lifetime, within limits;
    LOOK_AGAIN without a mapping."""
    if mapping is None:
        return LOOK_AGAIN
    return min(RENEWAL, max(SHORTEST_RENEWAL, mapping.lifetime / 2))
