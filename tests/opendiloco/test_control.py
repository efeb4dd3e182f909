from __future__ import annotations

import pytest
from pydantic import ValidationError

from opendiloco.workers.control import Failed, RunInnerLoop, parse_command, parse_reply
from peers.values.leases import SampleRange
from tests.opendiloco.trainings import training_done


def test_messages_survive_their_line() -> None:
    command = RunInnerLoop(number=1, index=2, samples=(SampleRange(0, 4), SampleRange(8, 9)), steps=3, tokens=4096)
    assert command.line().count(b"\n") == 1
    assert parse_command(command.line()) == command
    reply = training_done(samples=(SampleRange(0, 4),), loss=0.1)
    assert parse_reply(reply.line()) == reply
    failure = Failed(error="WorkerError", message="two\nlines", remedy="", traceback="a\nb\n")
    assert failure.line().count(b"\n") == 1
    assert parse_reply(failure.line()) == failure


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"nonsense\n",
        b'{"kind": "dance"}\n',
        b'{"kind": "end_inner_loop", "number": 1, "now": true}\n',
        b'{"kind": "run_inner_loop"}\n',
    ],
)
def test_what_is_no_command_is_refused(line: bytes) -> None:
    with pytest.raises(ValidationError):
        parse_command(line)
