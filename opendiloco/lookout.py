"""Looks at a volunteer now and then, and says what there is to see: see `Outlook`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from opendiloco.contributions import Contributions
from opendiloco.outlook import DOWNLOADING, FINISHED, OF_STATES, TRAINING, Outlook, Rate, Work
from opendiloco.screen import held_out_lines, reachability
from opendiloco.volunteer import Volunteer

LOSSES = 2000
"""Inner steps whose loss the curve has."""
RATE_SECONDS = 5.0
"""Over which a rate is taken."""


class RateMeter:
    """How fast a count grows."""

    def __init__(self) -> None:
        self._seen = deque[tuple[float, int]]()

    def rate(self, count: int, now: float) -> float:
        """Take in a count; return by how much a second it has grown lately."""
        self._seen.append((now, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now - RATE_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0]
        return (count - before) / (now - then) if now > then else 0.0


class Lookout:
    """Of one volunteer. `machine` says what can be read of this machine's temperature and power, in words."""

    def __init__(
        self, volunteer: Volunteer, reasons: Callable[[], tuple[str, ...]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`reasons` says why the volunteer is paused."""
        self.machine = ""
        self._volunteer = volunteer
        self._reasons = reasons
        self._clock = clock
        self._contributions = Contributions()
        self._losses = deque[float](maxlen=LOSSES)
        self._step = (0, 0)  # the last outer and inner step whose loss the curve has
        self._phase, self._since = "", clock()
        self._up, self._down = RateMeter(), RateMeter()

    def look(self) -> Outlook:
        volunteer, now = self._volunteer, self._clock()
        own, *others = volunteer.heartbeats()
        config = volunteer.run.config
        phase = FINISHED if volunteer.is_finished else OF_STATES[volunteer.state]
        if phase != self._phase:
            self._phase, self._since = phase, now
        if own.loss is not None and (own.index, own.inner_step) > self._step:
            self._step = own.index, own.inner_step
            self._losses.append(own.loss)
        self._contributions.read(volunteer.log)
        sent, received = volunteer.moved_bytes
        caps = volunteer.caps
        share, donors = self._share(phase, own.inner_step, config.training.inner_steps)
        held_out = held_out_lines([own, *others], volunteer.bytes_per_token)
        return Outlook(
            phase=phase,
            outer_step=own.index,
            outer_steps=config.total_outer_steps,
            inner_step=own.inner_step,
            inner_steps=config.training.inner_steps,
            work=Work(share, now - self._since),
            peers=1 + len(others),
            reach=_reach(reachability(own), len(own.relayed), len(own.unreached)),
            loss=own.loss,
            losses=tuple(self._losses),
            tokens_per_second=own.tokens_per_second,
            held_out=held_out[0] if held_out else None,
            contribution=self._contributions.of(own.peer),
            up=Rate(self._up.rate(sent, now), caps.upload),
            down=Rate(self._down.rate(received, now), caps.download),
            donors=donors,
            paused=self._reasons(),
            machine=self.machine,
        )

    def _share(self, phase: str, inner_step: int, inner_steps: int) -> tuple[float | None, int]:
        """Return how much of what is under way is done, and from how many donors it comes."""
        if phase == TRAINING:
            return inner_step / inner_steps, 0
        download = self._volunteer.download
        if phase == DOWNLOADING and download is not None:
            return min(sum(download.fetched.values()) / download.size, 1.0), len(download.fetched)
        return None, 0


def _reach(kind: str, relayed: int, unreached: int) -> str:
    said = [kind]
    said += [f"{relayed} relayed"] if relayed else []
    said += [f"{unreached} not reached"] if unreached else []
    return ", ".join(said)
