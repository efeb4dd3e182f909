"""An invented run, with a log in which peers come, go and die, and what they say of themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from opendiloco.config.run_config import RunConfig
from opendiloco.dashboard.watching import Source
from opendiloco.run import Run
from peers.log.certificate import Certificate, shortened
from peers.log.folder import RunLog
from peers.log.header import Header, Member
from peers.log.state import LogState, take_order
from peers.presence.heartbeat import Heartbeat, HeldOutLoss, PeerState
from peers.values.identity import Identity
from peers.values.leases import SampleRange
from peers.values.manifest import Amendment
from peers.values.signed_heads import NOTHING_SIGNED
from peers.values.wire import digest_of
from tests.opendiloco.training.recorded_run import amendment
from tests.peers.logs import certificate, next_header

ROOT = Path(__file__).parent.parent.parent.parent
HOSTILE = "</td><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"
"""What somebody says of itself, in the hope that a page takes it for more than text."""
AMENDED = 5
"""The entry that takes in an amendment."""
NOW = 1_800_000_000.0
TEAM = "<b>team</b> 1"


def identity(number: int) -> Identity:
    return Identity(Ed25519PrivateKey.from_private_bytes(bytes([number + 1]) * 32))


IDENTITIES = [identity(number) for number in range(6)]
PEERS = [one.peer_id for one in IDENTITIES]
KEYS = dict(zip(PEERS, IDENTITIES, strict=True))


def invented_run(name: str = "tiny") -> Run:
    config = RunConfig.from_toml(ROOT / "examples" / "tiny.toml")
    evaluation = config.evaluation.model_copy(update={"every": 2})
    return Run.sign(
        config.model_copy(update={"name": name, "outer_steps": 40, "evaluation": evaluation}), IDENTITIES[0]
    )


def members(log: LogState, peers: Sequence[str]) -> list[Member]:
    """All of these bring their whole leases; those without one a grant."""
    size, grants, found = log.samples_per_lease, iter(log.grants[place] for place in range(len(peers))), []
    for place, peer in enumerate(peers):
        samples: tuple[SampleRange, ...]
        if log.last is None:
            samples = (SampleRange(place * size, (place + 1) * size),)
        else:
            samples = log.leases[peer] if peer in log.leases else next(grants)
        tokens = log.tokens_per_sample * sum(piece.stop - piece.start for piece in samples)
        found.append(Member(peer=peer, tokens=tokens, samples=samples))
    return found


def signed(log: LogState, header: Header, signers: Sequence[str]) -> Certificate:
    made = certificate(log, header, signers, sign=lambda peer, text: KEYS[peer].sign(text))
    return shortened(made, log, header)


class InventedLog:
    """Entries, one after another."""

    def __init__(self, run: Run) -> None:
        self.end = run.settings.empty_log
        self.log = RunLog(self.end, 0)

    def add(
        self, peers: Sequence[str], gone: Sequence[str] = (), died: str = "", amendment: Amendment | None = None
    ) -> Header:
        """Add an entry. Of a member that `died` a quarter of its blocks has come."""
        ordered = take_order(self.end.roster, peers)
        roster = [
            one.model_copy(update={"tokens": one.tokens // 4}) if one.peer == died else one
            for one in members(self.end, ordered)
        ]
        index = self.end.position.index
        header = next_header(self.end, roster, digest_of(b"payload %d" % index), (), gone, amendment)
        voters = self.end.voters or header.peers
        proof = signed(self.end, header, [peer for peer in voters if peer in peers and peer != died])
        self.log.append(header, digest_of(b"state %d" % index), None, proof)
        self.end = self.end.append(header)
        return header


def said(run: Run, log: LogState, peer: str, sequence: int = 1, **more: Any) -> Heartbeat:
    """A heartbeat of a peer at the end of this log."""
    fields: dict[str, Any] = {
        "run": run.run_id,
        "peer": peer,
        "incarnation": 0,
        "sequence": sequence,
        "state": PeerState.TRAINING,
        "index": log.position.index,
        "head": log.position.head,
        "state_digest": digest_of(b"state"),
        "lineage_tokens": log.lineage_tokens,
        "inner_step": 3,
        "tokens_per_second": 1500.0,
        "speed": 1500.0,
        "loss": 2.5,
        "addresses": (),
        "roster_size": 3,
        "endpoints": ("203.0.113.5:31338",),
    }
    return Heartbeat(**(fields | more))


class Story:
    """A run that gets on each time somebody looks: what a source tells of it."""

    def __init__(self, steps: int = 14) -> None:
        self.run = invented_run()
        self.invented = InventedLog(self.run)
        self.sequence = 0
        self.source = Source(self.run, self.heartbeats, lambda: self.invented.log, lambda: NOTHING_SIGNED, me=PEERS[0])
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        """An outer step: a peer joins, one is late, one dies, one leaves; the run is amended."""
        index, everybody = self.invented.end.position.index, PEERS[:4]
        if index < 2:
            self.invented.add(PEERS[:3])
        elif index == 6:
            self.invented.add([PEERS[0], PEERS[1], PEERS[3]])
        elif index == 9:
            self.invented.add(everybody, died=PEERS[2])
        elif index > 10:
            self.invented.add([PEERS[0], PEERS[1], PEERS[3]], gone=[PEERS[2]] if index == 11 else [])
        else:
            values = {"outer_learning_rate": 0.5, "outer_momentum": 0.8}
            taken_in = amendment(self.run, 1, IDENTITIES[0], **values) if index == AMENDED else None
            self.invented.add(everybody, amendment=taken_in)

    def loss(self, step: float, peer: int = 0) -> float:
        return 1.6 + 3.8 * math.exp(-step / 5) + 0.06 * math.sin(7 * step + peer)

    async def heartbeats(self) -> list[Heartbeat]:
        self.sequence += 1
        end = self.invented.end
        index, inner = end.position.index, 3 + self.sequence % 5
        states = [PeerState.TRAINING, PeerState.TRAINING, PeerState.READY, PeerState.AVERAGING]
        beats = [
            said(
                self.run,
                end,
                PEERS[place],
                self.sequence,
                state=states[place],
                inner_step=inner,
                tokens_per_second=1450.0 + 310 * place,
                loss=self.loss(index + inner / 10, place),
                held_out=HeldOutLoss(index=index - index % 2, loss=self.loss(index - index % 2))
                if place == 0
                else None,
                endpoints=() if place == 1 else ("203.0.113.5:31338",),
                relays=("/ip4/198.51.100.7/tcp/31338",) if place == 1 else (),
                relayed=(PEERS[3][-8:],) if place == 1 else (),
                trouble=HOSTILE if place == 3 else "",
                team="" if place == 0 else TEAM,
            )
            for place in (0, 1, 3)
        ]
        archive = said(
            self.run, end, PEERS[5], self.sequence, state=PeerState.ARCHIVING, loss=None, tokens_per_second=0.0
        )
        return [*beats, archive]
