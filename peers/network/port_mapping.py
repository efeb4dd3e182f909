"""A port that the home router keeps open for this peer, in the background, if the router offers it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from peers.network.gateway import Gateway, Mapping
from peers.network.upnp import Upnp

logger = logging.getLogger(__name__)

LIFETIME = 3600.0  # seconds that we ask for; a router keeps the mapping for as long when we die
RENEWAL = 600.0  # seconds, at most, until we ask again, since a restarted router has forgotten the mapping
SHORTEST_RENEWAL = 30.0  # seconds, at least, for any lifetime that a router grants
LOOK_AGAIN = 1800.0  # seconds between two searches for a router that maps ports
CLOSING_SECONDS = 2.0  # for a router to end the mapping; otherwise it ends with its lifetime


class PortMapper:
    """A TCP port of ours, mapped while `run` goes on. `endpoint` is the external one; None while there is none."""

    def __init__(self, port: int, routers: Sequence[Gateway | Upnp] = ()) -> None:
        """`routers` are ways to ask the router; each remembers its last mapping, so that asking again renews it."""
        self._port = port
        self._routers = routers or (Gateway(), Upnp())
        self._router: Gateway | Upnp | None = None
        self._wakeup = asyncio.Event()
        self.endpoint: str | None = None

    def look_again(self) -> None:
        """Ask the router now, since this machine has slept, or is in another network."""
        self._wakeup.set()

    async def run(self) -> None:
        """Map the port, and renew the mapping until cancelled; then end it. Failures of routers are only logged."""
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
        """Return the first usable mapping. The router with the present mapping is asked first."""
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
    """Return the seconds until the router is asked again: half of a mapping's lifetime, within limits."""
    if mapping is None:
        return LOOK_AGAIN
    return min(RENEWAL, max(SHORTEST_RENEWAL, mapping.lifetime / 2))
