"""What the demo makes of how it went."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from opendiloco.errors import DemoError
from opendiloco.model.export import RunFacts
from opendiloco.run import Run
from opendiloco.tools.demo import DemoScreen, _Child, _DemoVolunteer, _finish, _judge, _Swarm
from opendiloco.view.run_view import Agreement
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG

FACTS = RunFacts(run_id="demo", manifest_digest="00", outer_steps=9, tokens=1, peers=2, held_out_loss=2.0)


@pytest.fixture
def swarm(tmp_path: Path) -> _Swarm:
    """Three volunteers, of which one has been killed, and one that came in the middle and trains."""
    found = _Swarm(cast(Run, None), "", tmp_path, cast(DemoScreen, None), [], agreement=Agreement())
    for number in (1, 2, 3, 4):
        found.volunteers[str(number)] = _DemoVolunteer(f"volunteer {number}", cast(_Child, None), trains=True)
    found.newcomer = found.volunteers["4"]
    found.agreement.observe([beat("a", LOG), beat("b", LOG)])
    return found


def test_all_went_well(swarm: _Swarm) -> None:
    assert _judge(swarm, FACTS, before=3.0) == ()


def test_a_newcomer_that_never_joined_was_not_shown(swarm: _Swarm) -> None:
    """Regression: a demo of one minute looked like success, though nobody had joined in the middle."""
    swarm.volunteers["4"].trains = False
    [problem] = _judge(swarm, FACTS, before=3.0)
    assert problem.startswith("the demo was too short: volunteer 4, which joined half way, had not fetched")
    assert "MINUTES" in problem


def test_nor_was_a_death_that_did_not_happen(swarm: _Swarm) -> None:
    swarm.newcomer = None
    [problem] = _judge(swarm, FACTS, before=3.0)
    assert problem.startswith("the demo was too short: no volunteer was killed")


def test_a_model_that_did_not_learn(swarm: _Swarm) -> None:
    assert _judge(swarm, FACTS, before=2.0) == ("the held-out loss has not fallen",)


def test_a_demo_without_an_outer_step_was_too_short(swarm: _Swarm) -> None:
    """Regression: on a busy machine a demo of one minute ended with "no peer gave its state"."""
    swarm.screen = cast(DemoScreen, SimpleNamespace(elapsed=60.0))
    for volunteer in swarm.volunteers.values():
        volunteer.child = cast(_Child, SimpleNamespace(exit_code=None))
    with pytest.raises(DemoError, match=r"too short: no outer step was taken in 60 s\. Give it more time: --minutes"):
        asyncio.run(_finish(swarm, cast(Any, None), cast(Any, None), 5.0))
