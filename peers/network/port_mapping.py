"""A port of the home router kept open for this peer, in the background, where the router offers it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from peers.network.gateway import Gateway, Mapping
from peers.network.upnp import Upnp

logger = logging.getLogger(__name__)

LIFETIME = 3600.0  # seconds that we ask for: what a router keeps when we die
RENEWAL = 600.0  # seconds after which we ask again at the latest: a router that restarts has forgotten us
SHORTEST_RENEWAL = 30.0  # seconds, whatever lifetime a router grants
LOOK_AGAIN = 1800.0  # seconds between looks for a router that maps ports
CLOSING_SECONDS = 2.0  # in which a router must take the mapping back: its lifetime ends it otherwise


class PortMapper:
    """A TCP port of ours, mapped while `run` goes on. `endpoint` is the external one; None: there is none now."""

    def __init__(self, port: int, routers: Sequence[Gateway | Upnp] = ()) -> None:
        """`routers` are ways of asking the router; each remembers what it was given, so that asking again renews it."""
        self._port = port
        self._routers = routers or (Gateway(), Upnp())
        self._router: Gateway | Upnp | None = None
        self._again = asyncio.Event()
        self.endpoint: str | None = None

    def look_again(self) -> None:
        """Ask the router now: this machine has slept, or is in another network."""
        self._again.set()

    async def run(self) -> None:
        """Map the port, renew the mapping until cancelled, then end it. Nothing that a router does is an error."""
        try:
            while True:
                self._again.clear()
                mapping = await self._map()
                self.endpoint = None if mapping is None else mapping.endpoint
                with suppress(TimeoutError):
                    async with asyncio.timeout(_renewal_after(mapping)):
                        await self._again.wait()
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSING_SECONDS):
                    await self._unmap()

    async def _map(self) -> Mapping | None:
        """Return the first mapping that we can use. The router that we have one from is asked first."""
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
    """Return the seconds after which the router is asked again: half a mapping's lifetime, within limits."""
    if mapping is None:
        return LOOK_AGAIN
    return min(RENEWAL, max(SHORTEST_RENEWAL, mapping.lifetime / 2))
