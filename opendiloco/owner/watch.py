"""The owner's commands and conditions, carried out on a volunteer: pause, resume, finish, leave.

A pause stops the training between two inner steps. The peer keeps its place: it keeps the log, votes, and counts as
late for the others. A longer pause would hold up every round. So the volunteer then leaves the run, gives back its
lease and frees its memory, and joins again from its disk when the pause is over.
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

LOOK_SECONDS = 2.0  # seconds between two looks at the machine, which are cheap
CALM_SECONDS = 30.0
"""Seconds for which a condition must be gone before training goes on, so that a short gap does not end the pause."""
LONGEST_HOLD = 60.0
"""Most seconds for which a paused volunteer keeps its place and memory, even if the grace of the others is longer."""
SHORTEST_HOLD = CALM_SECONDS + 2 * LOOK_SECONDS
"""Least seconds for which a volunteer that pauses for a condition keeps its place and memory. The end of a condition
shows only after CALM_SECONDS, and joining again costs more than waiting."""
NOTICED_SLEEP = 2.0  # a machine's sleep of fewer seconds is ignored, because it may be an error of measurement


ASKED = "you asked for it"
AWAY = "away"
"""The phase of a volunteer that has left the run for a pause, and will join again."""


def how_to_go_on(reasons: Sequence[str]) -> str:
    """Return the command that ends a pause for `reasons`, as text for the owner."""
    return f"`diloco-peer resume{'' if set(reasons) <= {ASKED} else ' --anyway'}` continues"


def _paused_for(reasons: Sequence[str]) -> str:
    """Return the line that shows the owner a pause for `reasons`, and the command that ends it."""
    return f"paused: {', '.join(reasons)}; {how_to_go_on(reasons)}"


class _OwnerRequests:
    """The owner's present requests: train, pause with reasons, or finish. Callers pass in the time."""

    def __init__(self, conditions: Sequence[Condition]) -> None:
        self.conditions = conditions
        self.is_asked = False
        self.is_finishing = False
        self._overruled = set[str]()  # names of overruled conditions, each kept until its condition ends
        self._held = dict[str, tuple[str, float]]()  # each condition's reason and the last time it held, by its name
        self._seen = set[str]()  # names of conditions that held at the last look

    @property
    def by_name(self) -> dict[str, str]:
        """The reasons to pause, by the names of their conditions; empty while the volunteer should train."""
        asked = {ASKED: ASKED} if self.is_asked else {}
        return asked | {name: reason for name, (reason, _) in self._held.items() if name not in self._overruled}

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(self.by_name.values())

    @property
    def is_long(self) -> bool:
        """True if a condition in force is marked as long: its pause outlasts the grace of the other peers."""
        holding = self._held.keys() - self._overruled
        return any(condition.is_long for condition in self.conditions if condition.name in holding)

    def observe(self, facts: Facts, now: float) -> None:
        """Update the conditions at time `now`. A condition begins to count when two looks in a row see it, so that a
        short peak does not pause the training, and ends when it has been gone for `CALM_SECONDS`."""
        found = {condition.name: condition.reason(facts) for condition in self.conditions}
        holding = {name: reason for name, reason in found.items() if reason is not None}
        for name, reason in holding.items():
            if name in self._seen or name in self._held:
                self._held[name] = reason, now
        self._seen = set(holding)
        self._held = {name: held for name, held in self._held.items() if now - held[1] < CALM_SECONDS}
        self._overruled &= set(self._held)

    def resume(self, anyway: bool) -> str:
        """End the pause that the owner asked for. With `anyway`, also overrule the conditions that hold, until they
        end. Return the answer to the owner."""
        self.is_asked = False
        if anyway:
            self._overruled |= set(self._held)
        if self.reasons:
            return f"still paused: {', '.join(self.reasons)}; `resume --anyway` overrules that"
        return "training goes on"


class _Volunteer(Protocol):
    """The part of a volunteer that `OwnersWatch` uses."""

    @property
    def outer_step(self) -> int: ...
    @property
    def is_at_work(self) -> bool: ...
    def hold(self, held: bool) -> None:
        """Pause the training if `held`, else resume the training."""

    def leave(self) -> None:
        """Send the other peers a farewell and leave the run."""


class OwnersWatch:
    """Looks at the machine every `LOOK_SECONDS`, and carries out the owner's commands and conditions."""

    def __init__(
        self,
        conditions: Sequence[Condition] = (),
        until: datetime | None = None,
        look: Callable[[], Facts] | None = None,
        say: Callable[[str], None] = logger.info,
        phase: Callable[[], str] = lambda: "starting",
    ) -> None:
        """Create the watch. `look` returns the facts of the machine, `say` shows a line to the owner, and `phase`
        returns the volunteer's present activity."""
        self._requests = _OwnerRequests(conditions)
        self._phase = phase
        self.until = until  # local time at which to leave; None: no such time
        self._comes_back = False
        self._facts = Facts(datetime.now())
        self._look = look or (lambda: self._facts)
        self._is_blind = False
        self._say = say
        self._asleep: float | None = None  # seconds that the machine has slept since it started
        self._volunteer: _Volunteer | None = None
        self._hold_seconds = 0.0
        self._shown = set[str]()  # names of the reasons to pause that the owner was last shown
        self._held_since: float | None = None
        self._finish_after: int | None = None
        self._is_leaving = False

    def begin(self, volunteer: _Volunteer, grace: float) -> None:
        """Start to control `volunteer`, for which the other peers wait `grace` seconds."""
        self._volunteer = volunteer
        self._hold_seconds = min(grace, LONGEST_HOLD)

    @property
    def comes_back(self) -> bool:
        """True if the volunteer will join again after this session: after the pause, or at once if the machine has
        slept."""
        return self._comes_back and not self._requests.is_finishing

    def say_farewell(self, farewell: str) -> None:
        """Show the owner the farewell of a volunteer that has left, or only its pause if it will join again."""
        if not self.comes_back:
            self._say(farewell)
        elif self.reasons:
            self._say(_paused_for(self.reasons))

    def end(self) -> None:
        """Stop controlling the volunteer, whose session is over."""
        self._volunteer = self._held_since = self._finish_after = None

    def stop(self) -> None:
        """Make the present session the last: the volunteer will not join again."""
        self._is_leaving, self._comes_back = True, False

    def answer(self, request: OwnerRequest) -> VolunteerStatus:
        """Carry out the owner's request, and return the volunteer's status."""
        says = self._phase()
        if request.do == "pause":
            self._requests.is_asked, says = True, "pausing"
        elif request.do == "resume":
            was_away = bool(self.reasons) and (self._volunteer is None or self.comes_back)
            says = self._requests.resume(request.anyway)
            if was_away and not self.reasons and not self._requests.is_finishing:
                says = "joining the run"
        elif request.do == "finish":
            self._requests.is_finishing, says = True, "leaving after this outer step"
        self._act(_awake())
        is_away = self.reasons and self._volunteer is None
        return VolunteerStatus(says=says, phase=AWAY if is_away else self._phase(), reasons=self.reasons)

    @property
    def reasons(self) -> tuple[str, ...]:
        return self._requests.reasons

    async def watch(self) -> None:
        """Read the machine's facts and act on them every `LOOK_SECONDS`, until the task is cancelled."""
        try:
            while True:
                await self._look_around()
                await asyncio.sleep(LOOK_SECONDS)
        except Exception:
            logger.exception("an internal error ended the watch for pause conditions: restart join to resume it")

    async def wait_until_wanted(self) -> bool:
        """Wait until there is no reason to pause, then return True, or until the volunteer should end, then return
        False."""
        if self.comes_back:
            self._is_leaving = self._comes_back = False
        is_sure = not self._requests.conditions  # a condition counts only after two looks in a row
        while True:
            await self._look_around()
            if self._is_leaving or self._requests.is_finishing:
                return False
            if not self._requests.reasons and is_sure:
                return True
            is_sure = True
            await asyncio.sleep(LOOK_SECONDS)

    async def _look_around(self) -> None:
        """Update the facts of the machine; if they cannot be read, keep the last ones."""
        try:
            self._facts = await asyncio.to_thread(self._look)
            self._is_blind = False
        except Exception as error:  # drivers and sensors fail in many ways
            if not self._is_blind:
                logger.warning("this machine's state cannot be read, so no pause begins or ends: %r", error)
            self._is_blind = True
        self.observe(replace(self._facts, now=datetime.now()), _awake(), _since_start())

    def observe(self, facts: Facts, awake: float, since_start: float) -> None:
        """Update the conditions from `facts`, and pause, resume or end the volunteer accordingly. `awake` and
        `since_start` are the seconds since the machine started, without and with those in which it slept."""
        self._requests.observe(facts, awake)
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
        """Pause, resume or end the volunteer as the owner's requests ask. `now` is in seconds since the
        machine's start, without sleep."""
        held = self._requests.by_name
        reasons = tuple(held.values())
        if held.keys() != self._shown:  # not the reasons, in which percentages change at each look
            self._say(_paused_for(reasons) if reasons else "the pause is over")
            self._shown = set(held)
        volunteer = self._volunteer
        if volunteer is None or self._is_leaving:
            return
        if bool(reasons) != (self._held_since is not None):
            volunteer.hold(bool(reasons))
            self._held_since = now if reasons else None
        longest = self._hold_seconds if self._requests.is_asked else max(self._hold_seconds, SHORTEST_HOLD)
        longest = 0.0 if self._requests.is_long else longest
        if self._held_since is not None and now - self._held_since >= longest:
            self._leave("the pause is long: leaving the run meanwhile", comes_back=True)
        if self._requests.is_finishing:
            if self._finish_after is None:
                self._finish_after = volunteer.outer_step
            if reasons or not volunteer.is_at_work or volunteer.outer_step > self._finish_after:
                self._leave("the outer step is done: leaving the run")

    def _leave(self, why: str, comes_back: bool = False) -> None:
        if self._is_leaving:
            return
        self._is_leaving, self._comes_back = True, comes_back
        self._say(why)
        if self._volunteer is not None:
            self._volunteer.leave()


def _awake() -> float:
    """Return the machine's seconds since its start, without those in which it slept."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def _since_start() -> float:
    """Return the machine's seconds since its start, with those in which it slept."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@asynccontextmanager
async def watching(watch: OwnersWatch) -> AsyncIterator[None]:
    """Run `watch` as a task until the context ends."""
    task = start_task(watch.watch())
    try:
        yield
    finally:
        await cancel_and_wait(task)
        watch.end()
