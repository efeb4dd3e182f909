"""Settings of a run that its manifest fixes, and settings of this peer that its owner has chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from peers.log.state import LogState, Quorum
from peers.values.manifest import Amendment


def follow_all(_: Amendment) -> str:
    """Return "", which means that this peer can follow any amendment."""
    return ""


@dataclass(frozen=True)
class Timing:
    """Times in seconds, each on the peer's own monotonic clock; clocks of different peers are never compared.

    The defaults are also those of the section `rounds` in `run.toml`.
    """

    heartbeat: float = 2.0
    heartbeat_expiry: float = 10.0
    grace: float = 10.0
    """Seconds for which a ready leader waits for live peers that are still training."""
    round_timeout: float = 120.0
    """Maximum seconds of one exchange of blocks. Blocks that arrive later are left out."""
    partition_grace: float = 60.0
    """Seconds for which a minority of the last roster waits for the rest before it goes on alone."""
    resend: float = 1.0
    """Seconds before an unanswered message is sent again."""
    leave: float = 10.0
    """Maximum seconds for a peer that was asked to leave to finish the round under way."""


@dataclass(frozen=True)
class RunSettings:
    """The settings that the protocol code uses: those of one run, and those of this peer in the run."""

    run: str
    manifest_digest: bytes
    inner_steps: int
    samples_per_lease: int
    tokens_per_sample: int
    minimum_peers: int = 1
    timing: Timing = Timing()
    staleness: int = 1
    """Entries that a peer may miss and still contribute its training for them."""
    smallest_share: float = 0.125
    """Smallest lease, as a share of a whole one; 1 if all leases are whole."""
    snapshot_every: int = 8
    """Cycles between two snapshots."""
    fragments: int = 1
    goes_on_alone: bool = True
    """True if the owner lets this peer train in a minority once most peers have been gone for the partition grace."""
    clip: float = 4.0
    """Largest norm of a contribution, as a multiple of the round's median norm. Longer ones are scaled down."""
    probation: int = 0
    """Outer steps in whose rosters a new identity neither counts nor votes."""
    exclusion: int = 1000
    """Cycles for which a proven lie excludes a peer; 0 if the log names no liars."""
    contributions: float | None = None
    """Share of the peers at work whose contributions are enough to begin a round; None if the run is synchronous."""
    overlap: int = 0
    """Inner steps for which a peer goes on training while a fragment is averaged."""
    organiser: str = ""
    """The peer whose amendments the log takes in."""
    why_not_followed: Callable[[Amendment], str] = field(default=follow_all, compare=False)
    """Returns why this version cannot follow an amendment; "" if it can."""
    quorum: Quorum = Quorum.MAJORITY
    """The share of the voters that decides."""

    @property
    def empty_log(self) -> LogState:
        """The run's log before its first entry."""
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
