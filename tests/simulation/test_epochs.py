"""A whole epoch in a swarm whose peers die, leave and come back: every sample is trained once.

A sample is trained when an entry counts it: it is in a member's samples, and all of that member's blocks arrived. What
the dead, the leavers and the cut off had leased, or trained in vain, is free again, and somebody else's next lease.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import cycle

from peers.log.header import Header
from peers.values.leases import sample_count
from tests.simulation.test_schedules import SETTINGS, watched
from tests.simulator.links import Faults
from tests.simulator.schedules import agreed
from tests.simulator.simulation import Swarm

EPOCH = 4000
PEERS = 6
LEASE = SETTINGS.samples_per_lease
MORTAL = ("peer0", "peer1", "peer2")
"""Whom blows meet, one at a time: the others are more than half of the roster."""
BAD = Faults(loss=0.02, duplication=0.1, stream_failure=0.02, longest_delay=0.3, suspicion=0.01)


class Ledger:
    """The entries of the swarm's lineage, and which of them trains each sample."""

    def __init__(self, swarm: Swarm) -> None:
        self._entries: dict[bytes, Header] = {}
        self._swarm = swarm
        swarm.on_apply = self._note

    def _note(self, name: str) -> None:
        self._entries |= {entry.digest: entry for entry in self._swarm.peers[name].peer.lineage.entries}

    def lineage(self) -> list[Header]:
        """Newest first, back to the first entry."""
        head, entries = self.last.digest, list[Header]()
        while head in self._entries:
            entries.append(self._entries[head])
            head = entries[-1].previous
        assert len(entries) == self.last.index + 1
        return entries

    @property
    def last(self) -> Header:
        last = max(self._swarm.living, key=lambda one: one.index).peer.log.last
        assert last is not None
        return last

    def trained(self) -> dict[int, Header]:
        """Fails when a sample is in two entries, or twice in one."""
        by: dict[int, Header] = {}
        for entry in self.lineage():
            for member in entry.roster:
                for piece in () if member.missed else member.samples:
                    for sample in range(*piece):
                        assert sample not in by, f"sample {sample} is in entries {by[sample].index} and {entry.index}"
                        by[sample] = entry
        return by

    def balance(self) -> None:
        """Each sample below the cursor is trained, or leased to one peer, or free to be leased: nothing else."""
        last = self.last
        leased = [sample for lease in last.leases for piece in lease.samples for sample in range(*piece)]
        free = [sample for piece in last.free for sample in range(*piece)]
        assert sorted([*self.trained(), *leased, *free]) == list(range(last.cursor))
        assert all(sample_count(lease.samples) == LEASE for lease in last.leases)
        assert len(last.leases) <= 2 * PEERS, (
            "one for each member, and one for each who may still bring what it trained"
        )


def takes_part(ledger: Ledger, name: str) -> bool:
    return name in ledger.last.peers


def churn(swarm: Swarm, ledger: Ledger, until: int) -> list[str]:
    """Blow after blow until the cursor has passed a sample. Returns what happened."""
    happened: list[str] = []
    for kind, name in zip(cycle(("kill", "leave", "cut off", "stop")), cycle(MORTAL), strict=False):
        if ledger.last.cursor >= until:
            return happened
        happened.append(kind)
        {"kill": swarm.kill, "leave": swarm.leave, "cut off": swarm.cut_off, "stop": swarm.stop}[kind](name)
        swarm.run(swarm.random.uniform(5.0, 40.0))
        swarm.heal()
        ledger.balance()
        swarm.run(swarm.random.uniform(0.0, 15.0))
        if swarm.peers[name] not in swarm.living:
            swarm.start(name)
        assert swarm.run(600.0, until=partial(takes_part, ledger, name)), f"waiting for {name} to take part again"
    raise AssertionError("blows go on for ever")


def test_every_sample_of_an_epoch_is_trained_exactly_once() -> None:
    swarm = Swarm(0, replace(SETTINGS, minimum_peers=1), BAD)
    watched(swarm)
    ledger = Ledger(swarm)
    for number in range(PEERS):
        swarm.start(f"peer{number}")
    assert swarm.run(200.0, until=lambda: swarm.longest >= 1 and agreed(swarm))
    happened = churn(swarm, ledger, EPOCH)
    assert set(happened) == {"kill", "leave", "cut off", "stop"}
    owed = set(range(EPOCH)) - set(ledger.trained())
    assert len(owed) <= 2 * PEERS * LEASE, "what is leased or was just given back"
    swarm.faults = Faults()
    goal = swarm.longest + 4
    assert swarm.run(1000.0, until=lambda: swarm.longest >= goal and agreed(swarm))
    ledger.balance()
    assert set(range(EPOCH)) <= set(ledger.trained()), "what was lost is trained by somebody else soon afterwards"


def test_what_the_dead_had_leased_is_trained_by_another() -> None:
    swarm = Swarm(3, SETTINGS)
    ledger = Ledger(swarm)
    for number in range(PEERS):
        swarm.start(f"peer{number}")
    assert swarm.run(200.0, until=lambda: swarm.longest >= 2 and agreed(swarm))
    swarm.kill("peer1")
    lost = [lease for lease in ledger.last.leases if lease.peer == "peer1"]
    samples = {sample for lease in lost for piece in lease.samples for sample in range(*piece)}
    assert len(samples) == LEASE
    assert not samples & ledger.trained().keys()
    goal = swarm.longest + 5
    assert swarm.run(1000.0, until=lambda: swarm.longest >= goal and agreed(swarm))
    ledger.balance()
    entries = {id(entry): entry for sample, entry in ledger.trained().items() if sample in samples}
    assert samples <= ledger.trained().keys()
    assert all("peer1" not in entry.peers for entry in entries.values())
