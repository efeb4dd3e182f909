"""Settings of a run, as its manifest fixes them, and of this peer, as its owner has chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from peers.log.state import LogState, Quorum
from peers.values.manifest import Amendment


def follow_all(_: Amendment) -> str:
    """Return no reason: every amendment can be followed."""
    return ""


@dataclass(frozen=True)
class Timing:
    """All in seconds on each peer's own monotonic clock; clocks of different peers are never compared.

    The defaults are those of `run.toml`'s section `rounds`, too.
    """

    heartbeat: float = 2.0
    heartbeat_expiry: float = 10.0
    grace: float = 10.0
    """How long a leader that is ready waits for live peers that are still training."""
    round_timeout: float = 120.0
    """How long one exchange of blocks may take at most: what has not come then is left out."""
    partition_grace: float = 60.0
    """How long a minority of the last roster waits for the rest before it goes on alone."""
    resend: float = 1.0
    """Pause before an unanswered message is sent again."""
    leave: float = 10.0
    """How long a peer that was asked to leave may take to finish the round it is in."""


@dataclass(frozen=True)
class RunSettings:
    """One run, as a peer's protocol code sees it."""

    run: str
    manifest_digest: bytes
    inner_steps: int
    samples_per_lease: int
    tokens_per_sample: int
    minimum_peers: int = 1
    timing: Timing = Timing()
    staleness: int = 1
    """Entries that a peer may miss and still contribute what it trained meanwhile."""
    smallest_share: float = 0.125
    """Of a whole lease, that the slowest peers train; 1: all train whole ones."""
    snapshot_every: int = 8
    """Cycles from one snapshot to the next."""
    fragments: int = 1
    goes_on_alone: bool = True
    """The owner's choice: whether to train with a minority when most have been gone for the partition grace."""
    clip: float = 4.0
    """Times the median norm of a round's contributions, that one of them counts with at most."""
    probation: int = 0
    """Outer steps in whose rosters a new identity neither counts nor votes."""
    exclusion: int = 1000
    """Cycles for which a proven lie excludes a peer; 0: the log names nobody."""
    contributions: float | None = None
    """Of those at work, the share whose contributions are enough for a round to begin; None: the run is synchronous."""
    overlap: int = 0
    """Inner steps for which a peer goes on training while a fragment is averaged."""
    organiser: str = ""
    """The peer whose amendments the log takes in."""
    why_not_followed: Callable[[Amendment], str] = field(default=follow_all, compare=False)
    """Returns why this version cannot follow an amendment; empty: it can."""
    quorum: Quorum = Quorum.MAJORITY
    """The share of the voters that decides."""

    @property
    def empty_log(self) -> LogState:
        """The log before its first entry."""
        return LogState(
            self.run,
            self.manifest_digest,
            self.samples_per_lease,
            self.tokens_per_sample,
            self.staleness,
            self.fragments,
            self.probation,
            self.exclusion,
            self.organiser,
            self.quorum,
        )
