"""A mapped port is kept: renewed, moved to another router, ended; whatever routers do, nothing is raised."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import cast

import pytest

from peers.network import port_mapping
from peers.network.gateway import Gateway, Mapping
from peers.network.port_mapping import LOOK_AGAIN, RENEWAL, SHORTEST_RENEWAL, PortMapper, _renewal_after
from peers.network.upnp import Upnp

PORT = 31338
PUBLIC = Mapping(IPv4Address("11.77.0.9"), 40000, 3600)
MOVED = Mapping(IPv4Address("11.77.0.10"), 40000, 3600)
CARRIERS = Mapping(IPv4Address("100.64.0.9"), 40000, 3600)


class FakeRouter:
    """Gives one answer after the other; the last one for ever."""

    def __init__(self, name: str, *answers: Mapping | OSError | None) -> None:
        self.name = name
        self._answers = list(answers)
        self.asked = 0
        self.has_mapping = False

    async def open(self, port: int, lifetime: float) -> Mapping | None:
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, OSError):
            raise answer
        self.has_mapping = self.has_mapping or answer is not None
        return answer

    async def close(self, port: int) -> None:
        if not self.has_mapping:
            raise OSError("the network is gone")
        self.has_mapping = False


def mapper_of(routers: Sequence[FakeRouter]) -> PortMapper:
    return PortMapper(PORT, cast(Sequence[Gateway | Upnp], routers))


async def until(mapper: PortMapper, endpoint: str | None) -> None:
    """Wait until the mapper has this endpoint."""
    async with asyncio.timeout(60):
        while mapper.endpoint != endpoint:
            await asyncio.sleep(0)


async def running(mapper: PortMapper, scenario: Coroutine[None, None, None]) -> None:
    task = asyncio.create_task(mapper.run())
    try:
        await scenario
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_the_first_router_that_maps_is_used_and_the_mapping_ended() -> None:
    routers = [FakeRouter("dead", OSError("unreachable")), FakeRouter("mute", None), FakeRouter("good", PUBLIC)]
    routers.append(FakeRouter("spare", MOVED))

    async def scenario() -> None:
        mapper = mapper_of(routers)

        async def story() -> None:
            await until(mapper, "11.77.0.9:40000")
            assert routers[2].has_mapping

        await running(mapper, story())

    asyncio.run(scenario())
    assert [router.asked for router in routers] == [1, 1, 1, 0]
    assert not routers[2].has_mapping


def test_on_another_network_the_router_is_asked_anew() -> None:
    """The one that had mapped the port comes first; then all others."""
    first, second = FakeRouter("first", None, MOVED), FakeRouter("second", PUBLIC, PUBLIC, OSError("gone"))

    async def scenario() -> None:
        mapper = mapper_of([first, second])

        async def story() -> None:
            await until(mapper, "11.77.0.9:40000")
            asked = second.asked
            while second.asked == asked:  # the answer is the same: nothing is told
                mapper.look_again()
                await asyncio.sleep(0)
            assert first.asked == 1
            mapper.look_again()
            await until(mapper, "11.77.0.10:40000")
            assert not second.has_mapping

        await running(mapper, story())

    asyncio.run(scenario())


def test_an_endpoint_that_is_lost_is_taken_back() -> None:
    router = FakeRouter("only", PUBLIC, None)

    async def scenario() -> None:
        mapper = mapper_of([router])

        async def story() -> None:
            await until(mapper, "11.77.0.9:40000")
            mapper.look_again()
            await until(mapper, None)

        await running(mapper, story())

    asyncio.run(scenario())


def test_a_port_of_the_carriers_network_is_given_back() -> None:
    """It leads nowhere from the internet; the next router may do better."""
    behind, good = FakeRouter("behind", CARRIERS), FakeRouter("good", PUBLIC)

    async def scenario() -> None:
        mapper = mapper_of([behind, good])

        async def story() -> None:
            await until(mapper, "11.77.0.9:40000")
            assert not behind.has_mapping

        await running(mapper, story())

    asyncio.run(scenario())


def test_mappings_are_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping, "SHORTEST_RENEWAL", 0.0)
    brief, moved = Mapping(PUBLIC.address, 40000, 0.01), Mapping(PUBLIC.address, 40001, 0.01)

    async def scenario() -> None:
        mapper = mapper_of([FakeRouter("brief", brief, brief, moved)])

        async def story() -> None:
            await until(mapper, "11.77.0.9:40000")
            await until(mapper, "11.77.0.9:40001")

        await running(mapper, story())

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("lifetime", "seconds"), [(120, 60), (3600, RENEWAL), (0, SHORTEST_RENEWAL), (2**32 - 1, RENEWAL)]
)
def test_renewal_is_at_half_the_lifetime_within_limits(lifetime: float, seconds: float) -> None:
    assert _renewal_after(Mapping(PUBLIC.address, 1, lifetime)) == seconds
    assert _renewal_after(None) == LOOK_AGAIN


def test_endpoints_are_written_as_heartbeats_want_them() -> None:
    assert PUBLIC.endpoint == "11.77.0.9:40000"
    assert Mapping(IPv6Address("2001:db8::9"), 40000, 1).endpoint == "[2001:db8::9]:40000"


def test_nothing_above_debug_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    routers = [FakeRouter("dead", OSError("unreachable")), FakeRouter("carrier", CARRIERS), FakeRouter("mute", None)]

    async def scenario() -> None:
        mapper = mapper_of(routers)

        async def story() -> None:
            while not routers[-1].asked:
                await asyncio.sleep(0)

        await running(mapper, story())

    with caplog.at_level("INFO"):
        asyncio.run(scenario())
    assert not caplog.records
