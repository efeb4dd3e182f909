"""Reads the progress of a volunteer, again and again."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

from opendiloco.view.chronicle import Chronicle
from opendiloco.view.contributions import Contribution, contribution_of
from opendiloco.view.progress import DOWNLOADING, FINISHED, OF_STATES, ROUTINE, TRAINING, Progress, Traffic, Work
from opendiloco.view.screen import held_out_lines, reachability
from opendiloco.volunteer import Volunteer
from peers.errors import DilocoPeerError
from peers.values.reach import Reach

logger = logging.getLogger(__name__)

LOSSES = 2000
"""Inner steps whose loss the curve has."""
RATE_SECONDS = 5.0
"""Over which a rate is taken."""


class RateMeter:
    """Measures how fast a count grows."""

    def __init__(self) -> None:
        self._seen = deque[tuple[float, int]]()

    def rate(self, count: int, now: float) -> float:
        """Take in a count; return by how much a second it has grown lately."""
        self._seen.append((now, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now - RATE_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0]
        return (count - before) / (now - then) if now > then else 0.0


class ProgressReader:
    """Reads one volunteer's progress. `pause_reasons` says why the volunteer is paused."""

    def __init__(
        self,
        volunteer: Volunteer,
        pause_reasons: Callable[[], tuple[str, ...]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.machine = ""
        """What is known of this machine's temperature and power, in words."""
        self._volunteer = volunteer
        self._pause_reasons = pause_reasons
        self._clock = clock
        self._chronicle = Chronicle()
        self._losses = deque[float](maxlen=LOSSES)
        self._last_step = (0, 0)  # the outer and the inner step of the newest loss
        self._phase, self._since = "", clock()
        self._up, self._down = RateMeter(), RateMeter()

    def read(self) -> Progress:
        """Return the progress at this moment."""
        volunteer, now = self._volunteer, self._clock()
        own, *others = volunteer.heartbeats()
        config = volunteer.run.config
        phase = FINISHED if volunteer.is_finished else OF_STATES[volunteer.state]
        if phase in ROUTINE and volunteer.trains_on:
            phase = TRAINING
        if phase != self._phase:
            self._phase, self._since = phase, now
        if own.loss is not None and (own.index, own.inner_step) > self._last_step:
            self._last_step = own.index, own.inner_step
            self._losses.append(own.loss)
        sent, received = volunteer.moved_bytes
        caps = volunteer.caps
        share, donors = self._share(phase, own.inner_step, config.training.inner_steps)
        return Progress(
            phase=phase,
            outer_step=own.index,
            outer_steps=config.total_outer_steps,
            inner_step=own.inner_step,
            inner_steps=config.training.inner_steps,
            work=Work(share, now - self._since),
            peers=1 + len(others),
            reachable=reachability(own),
            links=links_by_way(volunteer.reach, [beat.peer for beat in others]),
            loss=own.loss,
            losses=tuple(self._losses),
            tokens_per_second=own.tokens_per_second,
            held_out="".join(held_out_lines([own, *others], volunteer.bytes_per_token)),
            contribution=self._contribution(own.peer),
            fragments=volunteer.fragments,
            up=Traffic(self._up.rate(sent, now), caps.upload, sent),
            down=Traffic(self._down.rate(received, now), caps.download, received),
            donors=donors,
            pause_reasons=self._pause_reasons(),
            machine=self.machine,
        )

    def _contribution(self, peer: str) -> Contribution | None:
        """Return what this peer has contributed; None until the log has been read to its end."""
        try:
            is_behind = self._chronicle.read(self._volunteer.log)
        except DilocoPeerError as error:
            logger.debug("the log cannot be read for contributions: %s", error)
            return None
        return None if is_behind else contribution_of(peer, self._chronicle)

    def _share(self, phase: str, inner_step: int, inner_steps: int) -> tuple[float | None, int]:
        """Return how much of what is under way is done, and from how many donors it comes."""
        if phase == TRAINING:
            return inner_step / inner_steps, 0
        download = self._volunteer.download
        if phase == DOWNLOADING and download is not None:
            return min(sum(download.fetched.values()) / download.size, 1.0), len(download.fetched)
        return None, 0


def links_by_way(reach: Mapping[str, Reach], peers: Iterable[str]) -> dict[str, int]:
    """Return how many of these peers are reached by which way, the best way first. Unknown ways are left out."""
    counts = Counter(reach[peer] for peer in peers if peer in reach)
    return {str(way): counts[way] for way in Reach if counts[way]}
