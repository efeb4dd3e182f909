"""One stay in a run under its owner's eyes: who watches the machine, holds the training, and says when to leave.

A pause stops the training between two inner steps. The peer itself stays: it keeps the log, votes, and others see a
member that is late. One that pauses for longer than others wait for it would hold them up in every round, so it leaves
politely then, gives back its lease, and frees the memory; when the pause is over, it joins again from its disk.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Protocol

from opendiloco.owner.again import hold_back_toggles, listen_again
from opendiloco.owner.conditions import Condition, reasons
from opendiloco.owner.controls import Answer, Request, serve_controls
from opendiloco.owner.facts import Facts
from opendiloco.owner.sleep import SleepWatch, awake, since_start
from opendiloco.owner.wishes import CALM_SECONDS, Wishes
from opendiloco.quantities import duration

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
LONGEST_HOLD = 60.0
"""Seconds for which a paused volunteer keeps its place and memory at most, however long others would wait for it."""
SHORTEST_HOLD = CALM_SECONDS + 2 * LOOK_SECONDS
"""Seconds for which it keeps them at least where it was not asked to pause: for less than that nobody can know whether
what it pauses for is over already, and to join again costs more."""


class Held(Protocol):
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
        wishes: Wishes,
        conditions: Sequence[Condition] = (),
        until: datetime | None = None,
        look: Callable[[], Facts] | None = None,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        self.wishes = wishes
        self.phase: Callable[[], str] = lambda: "starting"
        """Says what the volunteer is doing."""
        self.until = until
        """When to leave; None: not by the clock."""
        self._comes_back = False
        self._conditions = conditions
        self._look = look or _facts_of_now
        self._facts = _facts_of_now()
        self._is_blind = False
        self._say = say
        self._sleep = SleepWatch()
        self._volunteer: Held | None = None
        self._hold_seconds = 0.0
        self._shown: tuple[str, ...] = ()
        self._held_since: float | None = None
        self._finish_after: int | None = None
        self._is_leaving = False

    def begin(self, volunteer: Held, grace: float) -> None:
        """Carry the wishes out on a volunteer, for which others wait `grace` seconds."""
        self._volunteer = volunteer
        self._hold_seconds = min(grace, LONGEST_HOLD)

    @property
    def comes_back(self) -> bool:
        """Whether the stay ends to begin anew: after the pause, or at once if the machine has slept."""
        return self._comes_back and not self.wishes.is_finishing

    def stop(self) -> None:
        """Whoever waits for the end of the stay leaves for good, whatever the stay ends for."""
        self._is_leaving, self._comes_back = True, False

    def answer(self, request: Request) -> Answer:
        """Do what a command asks for."""
        if request.do == "pause":
            says = self.wishes.pause()
        elif request.do == "resume":
            says = self.wishes.resume(request.anyway)
        elif request.do == "finish":
            says = self.wishes.finish()
        else:
            says = self.phase()
        self.act(awake())
        return Answer(says=says, phase=self.phase(), reasons=self.wishes.reasons)

    def toggle(self) -> None:
        """Pause or go on: what SIGUSR1 does."""
        self._say(self.wishes.toggle())
        self.act(awake())

    async def watch(self) -> None:
        """Look at the machine until cancelled."""
        while True:
            self.observe(await self._look_around(), awake(), since_start())
            await asyncio.sleep(LOOK_SECONDS)

    async def wait_until_wanted(self) -> bool:
        """Return when there is no reason to pause; whether the volunteer is wanted then."""
        for looks in count(1):
            self.observe(await self._look_around(), awake(), since_start())
            if self._is_leaving or self.wishes.is_finishing:
                return False
            if not self.wishes.is_paused and (looks > 1 or not self._conditions):  # one look shows no condition
                return True
            await asyncio.sleep(LOOK_SECONDS)
        raise AssertionError("the looks never end")

    async def _look_around(self) -> Facts:
        """Return the facts of now; where they cannot be had, those of the last look that saw any."""
        try:
            self._facts = await asyncio.to_thread(self._look)
            self._is_blind = False
        except Exception as error:  # whatever the machine's sensors and programs can do to whoever asks them
            if not self._is_blind:
                logger.warning("this machine cannot be looked at, so that pauses neither begin nor end: %r", error)
            self._is_blind = True
        return replace(self._facts, now=datetime.now())

    def observe(self, facts: Facts, awake: float, since_start: float) -> None:
        """Take in one look at the machine, at these times of the two clocks."""
        self.wishes.observe(reasons(self._conditions, facts), awake)
        slept = self._sleep.tick(awake, since_start)
        if slept:
            self._say(f"this machine has slept for {duration(slept)}")
        if self.until is not None and facts.now >= self.until:
            self._leave(f"it is {self.until:%H:%M}: leaving the run")
        if slept > self._hold_seconds and self._volunteer is not None:
            self._leave("the others have gone on: joining again", comes_back=True)
        self.act(awake)

    def act(self, now: float) -> None:
        """Carry out what the owner wants at time `now`."""
        wanted = self.wishes.reasons
        if wanted != self._shown:
            self._say(f"paused: {', '.join(wanted)}" if wanted else "the pause is over")
            self._shown = wanted
        volunteer = self._volunteer
        if volunteer is None or self._is_leaving:
            return
        if bool(wanted) != (self._held_since is not None):
            volunteer.hold(bool(wanted))
            self._held_since = now if wanted else None
        patience = self._hold_seconds if self.wishes.is_asked else max(self._hold_seconds, SHORTEST_HOLD)
        if self._held_since is not None and now - self._held_since >= patience:
            self._leave("the pause is long: leaving the run meanwhile", comes_back=True)
        self._finish(volunteer)

    def _finish(self, volunteer: Held) -> None:
        """Leave once the outer step is taken that was under way when the owner asked for that."""
        if not self.wishes.is_finishing:
            return
        if self._finish_after is None:
            self._finish_after = volunteer.outer_step
        if self.wishes.is_paused or not volunteer.is_at_work or volunteer.outer_step > self._finish_after:
            self._leave("the outer step is done: leaving the run")

    def _leave(self, why: str, comes_back: bool = False) -> None:
        if self._is_leaving:
            return
        self._is_leaving, self._comes_back = True, comes_back
        self._say(why)
        if self._volunteer is not None:
            self._volunteer.leave()


def _facts_of_now() -> Facts:
    return Facts(datetime.now())


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("nobody watches this machine for its owner any more", exc_info=error)


@asynccontextmanager
async def watching(watch: OwnersWatch, folder: Path) -> AsyncIterator[bool]:
    """Hear the owner's commands and signals, and watch the machine, until the context ends.

    Begins when there is no reason to pause, or the volunteer is not wanted any more: yields which.
    Raises: MachineError when the folder cannot have a control socket.
    """
    loop = asyncio.get_running_loop()
    async with serve_controls(folder, watch.answer):
        loop.add_signal_handler(signal.SIGUSR1, watch.toggle)
        listen_again()
        is_wanted = await watch.wait_until_wanted()
        task = asyncio.create_task(watch.watch())
        task.add_done_callback(_report_failure)
        try:
            yield is_wanted
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            hold_back_toggles()
            loop.remove_signal_handler(signal.SIGUSR1)
