"""A peer's heartbeats: what they say, how they keep up, what is measured with them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import REGISTRY

from peers.driver.driver import Driver
from peers.driver.pulse import REFRESH_BEATS, Pulse
from peers.log.folder import RunLog
from peers.log.lineage import Lineage
from peers.network.links import EAGER
from peers.network.transport import HivemindTransport
from peers.presence.heartbeat import Heartbeat
from peers.protocol.events import HeadsSeen, HeartbeatsSeen, SignedHeadsSeen
from peers.protocol.peer import Peer
from peers.values.identity import Identity
from peers.values.signed_heads import NOTHING_SIGNED, SignedHead, SignedHeads
from peers.values.workload import PayloadKind, Progress
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG, RUN, SETTINGS, STATE, chain_of, first_log, next_header
from tests.peers.rounds import SIZE

PAYLOADS = (PayloadKind(SIZE, lambda chunk, data, format: 0.0),)
ME, OTHER = Identity.generate(), Identity.generate()
EARLY, LATE = "/ip4/192.0.2.1/tcp/1", "/ip4/192.0.2.2/tcp/2"


class Network:
    """Whose addresses change as soon as somebody asks."""

    def __init__(self) -> None:
        self.addresses: tuple[str, ...] = (EARLY,)
        self.endpoints: tuple[str, ...] = ()
        self.links = SimpleNamespace(arranging=SimpleNamespace(addresses=()))
        self.dht = SimpleNamespace(expect_answers_within=self.expect)
        self.highest = 0
        self.is_calm = False
        """Whether a beat is enough."""
        self.beats: list[Heartbeat] = []
        self.voters: list[set[str]] = []
        self.silent: dict[str, float] | None = None
        """For how long each peer was silent; None: nobody was."""
        self.asked = 0
        self.published: list[Heartbeat] = []
        self.present: list[Heartbeat] = []
        self.connected: list[str] = []
        self.patience = math.inf
        self.signed = NOTHING_SIGNED
        self.runs = SimpleNamespace(signed_heads_of=lambda run: self.signed, amendment_of=lambda run: None)

    def expect(self, seconds: float) -> None:
        self.patience = seconds

    async def refresh_addresses(self) -> tuple[str, ...]:
        self.asked += 1
        self.addresses = (LATE,)
        return self.addresses

    async def connect(self, peer_id: str, addresses: tuple[str, ...]) -> bool:
        self.connected.append(peer_id)
        return True

    def discovery_of(self, run_id: str) -> Any:
        return SimpleNamespace(
            copies=SimpleNamespace(highest=self.highest),
            is_news=lambda heartbeat: not self.is_calm,
            beat=self.beat,
            silences=self.silences,
        )

    def silences(self) -> dict[str, float]:
        return dict.fromkeys((beat.peer for beat in self.present), 0.0) if self.silent is None else self.silent

    def beat(self, heartbeat: Heartbeat, voters: set[str]) -> None:
        self.beats.append(heartbeat)
        self.voters.append(voters)

    async def publish(self, heartbeat: bytes, run_id: str) -> bool:
        self.published.append(Heartbeat.verify(heartbeat, run_id))
        return True

    async def heartbeats(self, run_id: str) -> list[Heartbeat]:
        return self.present

    def credentials(self, run_id: str) -> tuple[bytes, int]:
        return b"", 0


def pulse_of(
    peer: Peer,
    network: Network,
    start: Callable[[Coroutine[None, None, None]], object] = lambda work: work.close(),
    log: RunLog | None = None,
) -> Pulse:
    host = SimpleNamespace(peer=peer, entries=RunLog(LOG, 0) if log is None else log, start=start)
    return Pulse(ME, cast(HivemindTransport, network), cast(Driver, host))


async def beats(network: Network, peer: Peer, count: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        pulse = pulse_of(peer, network, tasks.create_task)
        for _ in range(count):
            await pulse.beat()


def new_peer() -> Peer:
    return Peer(ME.peer_id, SETTINGS, PAYLOADS, STATE, 0.0, start=5, keys=ME)


def test_what_the_runs_archives_have_signed_is_held_against_the_log() -> None:
    network, peer, log = Network(), new_peer(), RunLog(LOG, 0)
    first = first_log().last
    assert first is not None
    log.follow(chain_of([first]), 1)
    head = SignedHead.sign(RUN, 1, bytes(32), OTHER.peer_id, OTHER)
    later = SignedHead.sign(RUN, 2, bytes(32), OTHER.peer_id, OTHER)
    network.signed = SignedHeads(RUN, (OTHER.peer_id,)).with_heads([head, later])
    pulse = pulse_of(peer, network, log=log)
    assert pulse.heartbeat().signed is None, "a volunteer never signs"
    assert next(pulse.known()) == SignedHeadsSeen(network.signed, {1: first_log().position.head})


def test_a_peer_that_began_in_the_middle_is_told_what_its_log_has_of_the_time_before() -> None:
    log, headers = RunLog(LOG, 0), [first_log().last]
    for _ in range(3):
        before = LOG.at(headers[-1])
        headers.append(next_header(before, [before.expected(peer) for peer in before.roster]))
    *_, last = headers
    peer = Peer(ME.peer_id, SETTINGS, PAYLOADS, STATE, 0.0, 5, ME, lineage=Lineage(LOG.at(last)))
    pulse = pulse_of(peer, Network(), log=log)
    nothing_signed = SignedHeadsSeen(NOTHING_SIGNED, {})
    assert list(pulse.known()) == [nothing_signed], "it has nothing yet"
    log.follow(chain_of([header for header in headers if header]), len(headers))
    _, seen = pulse.known()
    assert seen == HeadsSeen(len(headers), tuple(header.digest for header in headers if header))
    peer.handle(seen, 0.0)
    assert isinstance(seen, HeadsSeen)
    assert peer.lineage.heads == seen.heads
    assert list(pulse.known()) == [nothing_signed], "nothing lacks"


def test_addresses_are_asked_for_now_and_then() -> None:
    """Regression: heartbeats kept the addresses of the start; relays and port mappings come later."""
    network = Network()
    asyncio.run(beats(network, new_peer(), REFRESH_BEATS + 1))
    assert network.asked == 2
    assert {heartbeat.addresses for heartbeat in network.published} == {(LATE,)}


def test_while_a_beat_is_enough_nothing_is_signed() -> None:
    network, peer = Network(), new_peer()
    asyncio.run(beats(network, peer, 1))
    network.is_calm = True
    asyncio.run(beats(network, peer, 9))
    assert (len(network.published), len(network.beats)) == (1, 9)
    sequences = [heartbeat.sequence for heartbeat in network.beats]  # the first run had a pulse of its own
    assert sequences == sorted(set(sequences))
    assert network.voters == [set()] * 9, "before the first entry there are none"


def test_what_was_said_with_our_key_before_is_followed() -> None:
    network = Network()
    network.highest = 2**61
    assert pulse_of(new_peer(), network).heartbeat().sequence == 2**61 + 1


def test_whom_we_do_not_hear_is_connected_to_and_not_told_of() -> None:
    """Others hand its heartbeat out: that is no sign of life."""
    network = Network()
    network.present, network.silent = [beat(OTHER.peer_id, LOG)], {}

    async def scenario() -> HeartbeatsSeen:
        async with asyncio.TaskGroup() as tasks:
            return await pulse_of(new_peer(), network, tasks.create_task).beat()

    assert asyncio.run(scenario()) == HeartbeatsSeen((), {}, frozenset({OTHER.peer_id}))
    assert network.connected == [OTHER.peer_id]


def test_a_silent_dht_node_does_not_use_up_a_beat() -> None:
    """Regression: a beat was cut off while it still waited for one frozen machine, again and again; nobody heard of
    anybody any more, and the run fell apart."""
    network = Network()
    asyncio.run(beats(network, new_peer(), 1))
    waits = 2 * network.patience  # where to put ours, and where theirs are
    assert waits + SETTINGS.timing.heartbeat < SETTINGS.timing.heartbeat_expiry


def test_peers_that_are_gone_are_forgotten() -> None:
    network = Network()

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            pulse = pulse_of(new_peer(), network, tasks.create_task)
            for present in ([beat(OTHER.peer_id, LOG)], [beat(OTHER.peer_id, LOG)], [], [beat(OTHER.peer_id, LOG)]):
                network.present = present
                await pulse.beat()

    asyncio.run(scenario())
    assert network.connected == [OTHER.peer_id] * 2


def test_in_a_large_swarm_nobody_dials_all_others() -> None:
    network = Network()
    network.present = [beat(f"peer{number}", LOG) for number in range(EAGER + 1)]
    asyncio.run(beats(network, new_peer(), 2))
    assert network.connected == []


def test_a_beat_says_for_how_long_others_were_silent() -> None:
    """Regression: a peer was taken to be alive from the beat at which this was heard, not from when it came, so a death
    was noticed up to a heartbeat later than the time limits of rounds allow for."""
    network, peer = Network(), new_peer()
    network.present = [beat(OTHER.peer_id, LOG)]
    network.silent = {OTHER.peer_id: 4.0}

    async def scenario() -> HeartbeatsSeen:
        async with asyncio.TaskGroup() as tasks:
            return await pulse_of(peer, network, tasks.create_task).beat()

    peer.handle(asyncio.run(scenario()), 100.0)
    expiry = peer.settings.timing.heartbeat_expiry
    assert peer.membership.is_live(OTHER.peer_id, 96.0 + expiry)
    assert not peer.membership.is_live(OTHER.peer_id, 96.1 + expiry)


def measured(name: str) -> float:
    value = REGISTRY.get_sample_value(f"diloco_peer_{name}")
    assert value is not None
    return value


def test_who_does_not_train_has_no_speed_and_no_loss() -> None:
    """Regression: a peer that had finished reported its last speed and loss for ever."""
    peer = new_peer()
    peer.trainer.progress = Progress(3, 2.5, 1000.0)
    asyncio.run(beats(Network(), peer, 1))
    assert (measured("tokens_per_second"), measured("loss")) == (1000.0, 2.5)
    peer.trainer.progress = None
    asyncio.run(beats(Network(), peer, 1))
    assert measured("tokens_per_second") == 0.0
    assert math.isnan(measured("loss"))
