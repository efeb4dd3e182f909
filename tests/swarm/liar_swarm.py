"""A swarm of real processes, one of which lies, seen from outside."""

from __future__ import annotations

import base64
from pathlib import Path

from benchmarks.processes import Event
from peers.values.identity import Identity
from tests.swarm.fault_swarm import Entry, Swarm, Volunteer, divergences
from tests.swarm.liar_peer import PEERS, VALUES
from tests.swarm.networks import Place
from tests.swarm.vector_workload import TRAINING_SECONDS, VectorWorkload

PROGRAM = "tests.swarm.liar_peer"
ENTRIES = 2
"""How many more the honest make during each lie."""
FAR = 100.0
"""Further than any honest training moves a value of theta."""


class Suspect(Volunteer):
    """A peer that may be told to lie."""

    has_lied = is_honest = False

    def lie(self, name: str) -> None:
        self.has_lied = self.is_honest = False
        self._running.tell(f"lie {name}")

    def be_honest(self) -> None:
        self._running.tell("honest")

    def hear(self, event: Event) -> None:
        super().hear(event)
        self.has_lied |= event["event"] == "lied"
        self.is_honest |= event["event"] == "honest"


class LiarSwarm(Swarm):
    """The volunteer with the smallest id, which leads at first, may lie."""

    def __init__(self, folder: Path, training: float = TRAINING_SECONDS) -> None:
        super().__init__(None, folder)
        keys = sorted((Identity.generate() for _ in range(PEERS)), key=lambda key: key.peer_id)
        logs = [folder / f"{name}.log" for name in ("liar", *range(1, PEERS))]
        for key, log in zip(keys, logs, strict=True):
            key.save(log.with_suffix(".pem"))
        place, program = Place(), (PROGRAM, "--training", str(training))
        self.liar = Suspect(place, None, logs[0], self._news, program)
        self.honest = [Volunteer(place, None, log, self._news, (*program, "--honest")) for log in logs[1:]]
        self.volunteers = [self.liar, *self.honest]
        self._logs = logs[1:]
        self._replayed = VectorWorkload(VALUES)
        self._states = list[str]()
        """After each entry, as the payloads lead to it."""

    # What the liar does ---------------------------------------------------------------------------------------
    async def lie(self, name: str) -> None:
        """Have the liar tell this lie, until it has."""
        self.liar.lie(name)
        await self.until(lambda: self.liar.has_lied, f"a liar that tells {name}")

    async def be_honest(self) -> None:
        self.liar.be_honest()
        await self.until(lambda: self.liar.is_honest, "a liar that is honest again")

    async def led_by_the_liar(self) -> None:
        """Have the liar start again, and then each leader, until the liar leads: a peer that comes back is last in the
        roster, and a leader is followed by the next one of the roster (R1)."""
        await self.part_of(self.liar)
        if self.leader != self.liar.id:
            await self.restart(self.liar)
        while self.leader != self.liar.id:
            [leader] = (one for one in self.volunteers if one.id == self.leader)
            await self.restart(leader)

    async def led_by_others(self) -> None:
        """Have an honest peer lead, and the liar take part."""
        await self.part_of(self.liar)
        while self.leader == self.liar.id:
            await self.restart(self.liar)

    async def restart(self, peer: Volunteer) -> None:
        """Start a peer again: it comes last in the roster, and has forgotten what it applied."""
        await self.check()
        async with peer.killed():  # until there is an entry without it, or it keeps its place
            since, others = self.index + 1, [one for one in self.honest if one is not peer]
            await self.until(
                lambda: any(
                    index >= since and peer.id not in entry.members
                    for one in others
                    for index, entry in one.applied.items()
                ),
                f"an entry without {peer.id}",
            )
        await self.part_of(peer)

    async def part_of(self, peer: Volunteer) -> None:
        since = self.index + 1
        await self.until(lambda: self.counts(peer, since), f"an entry in which {peer.id} counts")

    # What the honest make -------------------------------------------------------------------------------------
    @property
    def index(self) -> int:
        """The last entry that anybody honest has."""
        return max(max(one.applied, default=-1) for one in self.honest)

    @property
    def leader(self) -> str:
        """The peer that led the newest entry that all honest peers have."""
        return self.entries(0)[-1].leader

    def entries(self, since: int) -> list[Entry]:
        """Entries from the index `since` on that all honest peers have applied."""
        first, *others = (one.applied for one in self.honest)
        common = sorted(index for index in first if index >= since and all(index in other for other in others))
        return [first[index] for index in common]

    def counts(self, peer: Volunteer, since: int) -> bool:
        return any(peer.id in entry.members for entry in self.entries(since))

    async def thrive(self, while_: str) -> None:
        """Wait until the honest have made some more entries, and all of them count in one. See whether they agree, and
        have the state that the payloads lead to."""
        since = self.index + 1
        await self.until(
            lambda: len(self.entries(since)) >= ENTRIES and all(self.counts(one, since) for one in self.honest),
            f"entries from {since} on in which all honest peers count, while there is {while_}",
        )
        await self.check()

    async def found_out(self, text: str) -> None:
        """Wait until an honest peer's log says this of the liar."""

        def is_said() -> bool:
            return any(f"{self.liar.id} {text}" in log.read_text(errors="replace") for log in self._logs)

        await self.until(is_said, f"an honest peer that says: the liar {text}")

    async def check(self) -> None:
        """Replay all that was applied since the last look."""
        assert not divergences(self.honest, 0), "the honest disagree"
        made = {index: entry for one in self.honest for index, entry in one.applied.items()}
        while entry := made.get(len(self._states)):
            await self._replayed.apply(base64.b64decode(entry.payload), len(self._states))
            assert abs(self._replayed.state.theta).max() < FAR
            self._states.append((await self._replayed.state_digest()).hex())
        for index, entry in made.items():
            assert entry.state == self._states[index], f"entry {index} does not lead to the state that it should"
