"""A volunteer under its owner's eyes: what the owner wants, and who watches the machine and carries it out.

A pause stops the training between two inner steps. The peer itself stays: it keeps the log, votes, and others see a
member that is late. One that pauses for longer than others wait for it would hold them up in every round, so it leaves
politely then, gives back its lease, and frees the memory; when the pause is over, it joins again from its disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from typing import Protocol

from opendiloco.owner.conditions import Condition
from opendiloco.owner.controls import OwnerRequest, VolunteerStatus
from opendiloco.owner.facts import Facts
from opendiloco.quantities import duration
from peers.values.system import cancel_and_wait, start_task

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0  # between two looks at the machine, which cost little
CALM_SECONDS = 30.0
"""For how long a condition must not hold before training goes on: what comes and goes would stop it again and again."""
LONGEST_HOLD = 60.0
"""Seconds for which a paused volunteer keeps its place and memory at most, however long others would wait for it."""
SHORTEST_HOLD = CALM_SECONDS + 2 * LOOK_SECONDS
"""Seconds for which it keeps them at least where it was not asked to pause: for less than that nobody can know whether
what it pauses for is over already, and to join again costs more."""
NOTICED_SLEEP = 2.0  # seconds: two clocks that are read one after the other differ a little


ASKED = "you asked for it"


def how_to_go_on(reasons: Sequence[str]) -> str:
    """Return the command that ends a pause for these reasons."""
    return "`diloco-peer resume` goes on" if set(reasons) <= {ASKED} else "`diloco-peer resume --anyway` goes on anyway"


class _Wishes:
    """What the owner wants of a volunteer now: to train, to pause and why, or to finish. Knows no clock of its own."""

    def __init__(self, conditions: Sequence[Condition]) -> None:
        self.conditions = conditions
        self.is_asked = False
        self.is_finishing = False
        self._overruled = set[str]()  # names of conditions that do not count until they have ended
        self._held = dict[str, tuple[str, float]]()  # reasons by name, and when each was last seen
        self._seen = set[str]()  # names of the conditions that held at the last look

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why to pause; empty while the volunteer is to train."""
        asked = (ASKED,) if self.is_asked else ()
        return asked + tuple(reason for name, (reason, _) in self._held.items() if name not in self._overruled)

    @property
    def is_long(self) -> bool:
        """Return whether a pause lasts for longer than others wait, as one of its conditions says."""
        holding = self._held.keys() - self._overruled
        return any(condition.is_long for condition in self.conditions if condition.name in holding)

    def observe(self, facts: Facts, now: float) -> None:
        """Take in which conditions hold at time `now`: each counts from the second look in a row on that sees it, since
        a program may be busy for a moment, and until it has been gone for a while."""
        found = {condition.name: condition.reason(facts) for condition in self.conditions}
        holding = {name: reason for name, reason in found.items() if reason is not None}
        for name, reason in holding.items():
            if name in self._seen or name in self._held:
                self._held[name] = reason, now
        self._seen = set(holding)
        self._held = {name: held for name, held in self._held.items() if now - held[1] < CALM_SECONDS}
        self._overruled &= set(self._held)

    def resume(self, anyway: bool) -> str:
        """Go on; with `anyway` also against conditions that hold now, until they have ended."""
        self.is_asked = False
        if anyway:
            self._overruled |= set(self._held)
        if self.reasons:
            return f"still paused: {', '.join(self.reasons)}; `resume --anyway` overrules that"
        return "training goes on"


class _Held(Protocol):
    """What an owner's wishes are carried out on: a volunteer."""

    @property
    def outer_step(self) -> int: ...
    @property
    def is_at_work(self) -> bool: ...
    def hold(self, held: bool) -> None:
        """Make no inner step, or go on."""

    def leave(self) -> None:
        """Leave politely."""


class OwnersWatch:
    """Looks at the machine now and then, and does what the owner wants."""

    def __init__(
        self,
        conditions: Sequence[Condition] = (),
        until: datetime | None = None,
        look: Callable[[], Facts] | None = None,
        say: Callable[[str], None] = logger.info,
        phase: Callable[[], str] = lambda: "starting",
    ) -> None:
        """`phase` says what the volunteer is doing."""
        self._wishes = _Wishes(conditions)
        self._phase = phase
        self.until = until  # when to leave; None: not by the clock
        self._comes_back = False
        self._facts = Facts(datetime.now())
        self._look = look or (lambda: self._facts)
        self._is_blind = False
        self._say = say
        self._asleep: float | None = None  # seconds for which the machine has slept since its start
        self._volunteer: _Held | None = None
        self._hold_seconds = 0.0
        self._shown: tuple[str, ...] = ()
        self._held_since: float | None = None
        self._finish_after: int | None = None
        self._is_leaving = False

    def begin(self, volunteer: _Held, grace: float) -> None:
        """Carry the wishes out on a volunteer, for which others wait `grace` seconds."""
        self._volunteer = volunteer
        self._hold_seconds = min(grace, LONGEST_HOLD)

    @property
    def comes_back(self) -> bool:
        """Whether the stay ends to join again: after the pause, or at once if the machine has slept."""
        return self._comes_back and not self._wishes.is_finishing

    def end(self) -> None:
        """Let the volunteer go, whose stay is over."""
        self._volunteer = self._held_since = self._finish_after = None

    def stop(self) -> None:
        """Whoever waits for the end of the stay leaves for good, whatever the stay ends for."""
        self._is_leaving, self._comes_back = True, False

    def answer(self, request: OwnerRequest) -> VolunteerStatus:
        """Do what a command asks for."""
        says = self._phase()
        if request.do == "pause":
            self._wishes.is_asked, says = True, "pausing"
        elif request.do == "resume":
            says = self._wishes.resume(request.anyway)
        elif request.do == "finish":
            self._wishes.is_finishing, says = True, "leaving after this outer step"
        self._act(_awake())
        return VolunteerStatus(says=says, phase=self._phase(), reasons=self.reasons)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the training is paused; empty while it is not."""
        return self._wishes.reasons

    async def watch(self) -> None:
        """Look at the machine until cancelled."""
        try:
            while True:
                await self._look_around()
                await asyncio.sleep(LOOK_SECONDS)
        except Exception:
            logger.exception("nobody watches this machine for its owner any more")

    async def wait_until_wanted(self) -> bool:
        """Return when there is no reason to pause; whether the volunteer is wanted then."""
        if self.comes_back:
            self._is_leaving = self._comes_back = False
        is_sure = not self._wishes.conditions  # one look shows no condition
        while True:
            await self._look_around()
            if self._is_leaving or self._wishes.is_finishing:
                return False
            if not self._wishes.reasons and is_sure:
                return True
            is_sure = True
            await asyncio.sleep(LOOK_SECONDS)

    async def _look_around(self) -> None:
        """Take in the facts of now; where they cannot be had, those of the last look that saw any."""
        try:
            self._facts = await asyncio.to_thread(self._look)
            self._is_blind = False
        except Exception as error:  # whatever the machine's sensors and programs can do to whoever asks them
            if not self._is_blind:
                logger.warning("this machine cannot be looked at, so that pauses neither begin nor end: %r", error)
            self._is_blind = True
        self.observe(replace(self._facts, now=datetime.now()), _awake(), _since_start())

    def observe(self, facts: Facts, awake: float, since_start: float) -> None:
        """Take in one look at the machine, at these times of the two clocks."""
        self._wishes.observe(facts, awake)
        asleep = since_start - awake
        slept = 0.0 if self._asleep is None else asleep - self._asleep
        self._asleep = asleep
        if slept >= NOTICED_SLEEP:
            self._say(f"this machine has slept for {duration(slept)}")
        if self.until is not None and facts.now >= self.until:
            self._leave(f"it is {self.until:%H:%M}: leaving the run")
        if slept > max(self._hold_seconds, NOTICED_SLEEP) and self._volunteer is not None:
            self._leave("the others have gone on: joining again", comes_back=True)
        self._act(awake)

    def _act(self, now: float) -> None:
        """Carry out what the owner wants at time `now`."""
        wanted = self._wishes.reasons
        if wanted != self._shown:
            said = f"paused: {', '.join(wanted)}; {how_to_go_on(wanted)}" if wanted else "the pause is over"
            self._say(said)
            self._shown = wanted
        volunteer = self._volunteer
        if volunteer is None or self._is_leaving:
            return
        if bool(wanted) != (self._held_since is not None):
            volunteer.hold(bool(wanted))
            self._held_since = now if wanted else None
        patience = self._hold_seconds if self._wishes.is_asked else max(self._hold_seconds, SHORTEST_HOLD)
        patience = 0.0 if self._wishes.is_long else patience
        if self._held_since is not None and now - self._held_since >= patience:
            self._leave("the pause is long: leaving the run meanwhile", comes_back=True)
        if self._wishes.is_finishing:
            if self._finish_after is None:
                self._finish_after = volunteer.outer_step
            if wanted or not volunteer.is_at_work or volunteer.outer_step > self._finish_after:
                self._leave("the outer step is done: leaving the run")

    def _leave(self, why: str, comes_back: bool = False) -> None:
        if self._is_leaving:
            return
        self._is_leaving, self._comes_back = True, comes_back
        self._say(why)
        if self._volunteer is not None:
            self._volunteer.leave()


def _awake() -> float:
    """Return seconds that do not count while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def _since_start() -> float:
    """Return seconds since the machine was started, also those in which it slept."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@asynccontextmanager
async def watching(watch: OwnersWatch) -> AsyncIterator[None]:
    """Watch the machine, and the volunteer that begins meanwhile, until the context ends."""
    task = start_task(watch.watch())
    try:
        yield
    finally:
        await cancel_and_wait(task)
        watch.end()
