"""How log lines look, and what each says of where it comes from."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opendiloco.cli import logs
from opendiloco.cli.logs import PLACE, LogOptions

logger = logging.getLogger("opendiloco.test")


@pytest.fixture(autouse=True)
def root_stays_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    root.handlers = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:], root.level = before


@pytest.fixture
def place() -> None:
    PLACE.run, PLACE.peer, PLACE.outer_step = "demo-abc", "12D3KooWpeerNumberOne", lambda: 7


def logged(options: LogOptions) -> str:
    stream = io.StringIO()
    options.send_to(logging.StreamHandler(stream), "info", logs.FORMAT_WITH_PLACE)
    logger.info("trained %d", 3)
    return stream.getvalue()


@pytest.mark.usefixtures("place")
def test_a_line_says_where_it_comes_from() -> None:
    assert logged(LogOptions(None, None)).endswith(" INFO    [demo-abc …umberOne #7] trained 3\n")


def test_a_peers_words_do_not_rewrite_a_terminal() -> None:
    stream = io.StringIO()
    LogOptions(None, None).send_to(logging.StreamHandler(stream), "info")
    logger.info("a peer says: %s", "\x1b[2J\x9b1A\rall is well")
    assert stream.getvalue().removesuffix("\n").isprintable()


@pytest.mark.parametrize(("level", "shown"), [(None, False), ("debug", True)])
def test_libraries_do_not_warn_of_their_own_builds(level: str | None, shown: bool) -> None:
    """Regression: where torchao is installed `run create` began with four warnings about it."""
    LogOptions(level, None).start("warning")
    assert logging.getLogger("torchao").isEnabledFor(logging.WARNING) is shown
    assert logging.getLogger("datasets").isEnabledFor(logging.WARNING)


def test_a_program_that_builds_a_model_sees_no_warnings_of_other_libraries() -> None:
    """Regression: a script around `DiLoCo` or `Reference` began with four warnings about torchao."""
    pytest.importorskip("torchao")
    loaded = "import opendiloco.model, torchao.quantization"  # transformers imports it to build a model
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("flooded", [logger.warning, logging.getLogger("peers.network.link").info])
def test_a_flood_of_warnings_is_held_back_and_counted(
    flooded: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: one stranger had a node write 1,500 lines a second."""
    stream, clock = io.StringIO(), [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(time, "time_ns", lambda: int(clock[0] * 1e9))
    LogOptions(None, None).send_to(logging.StreamHandler(stream), "info")

    def flood() -> list[str]:
        stream.seek(0)
        stream.truncate()
        for number in range(1000):
            flooded("dropped message %d", number)
            logger.info("step %d", number)
        logger.warning("another")
        return stream.getvalue().splitlines()

    said = flood()
    assert sum("dropped" in line for line in said) == 30
    assert sum("step" in line for line in said) == 1000
    assert said[-1].endswith("another")
    clock[0] += 5.0
    [line] = [line for line in flood() if "dropped" in line]
    assert line.endswith("dropped message 0 (970 similar lines were left out)")


def test_outer_steps_log_their_ordinary_messages_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, clock = io.StringIO(), [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(time, "time_ns", lambda: int(clock[0] * 1e9))
    LogOptions(None, None).send_to(logging.StreamHandler(stream), "info")
    checkpointer = logging.getLogger("opendiloco.storage.checkpointer")
    for _ in range(240):  # for two minutes
        checkpointer.info("saved")
        clock[0] += 0.5
    checkpointer.warning("failed")
    said = [line.split()[-1] for line in stream.getvalue().splitlines()]
    assert said == ["saved"] * 3 + ["failed"], "two at the beginning, then one a minute"


def test_a_line_of_no_run_says_nothing_of_one() -> None:
    assert logged(LogOptions(None, None)).endswith(" INFO    trained 3\n")


@pytest.mark.usefixtures("place")
def test_json_has_the_same() -> None:
    said = json.loads(logged(LogOptions(None, None, is_json=True)))
    assert said.pop("time").endswith("Z")
    assert said == {
        "level": "info",
        "logger": "opendiloco.test",
        "message": "trained 3",
        "run": "demo-abc",
        "peer": "12D3KooWpeerNumberOne",
        "outer_step": 7,
    }


def test_a_traceback_stays_on_the_line() -> None:
    stream = io.StringIO()
    LogOptions(None, None, is_json=True).send_to(logging.StreamHandler(stream), "info")
    try:
        raise ValueError("a reason")
    except ValueError:
        logger.exception("it failed")
    [line] = stream.getvalue().splitlines()
    assert "ValueError: a reason" in json.loads(line)["error"]


def test_a_file_is_renamed_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FILE_BYTES", 100)
    LogOptions(None, tmp_path / "log").start("info")
    for number in range(40):
        logger.info("line %d", number)
    assert {path.name for path in tmp_path.iterdir()} == {"log", "log.1", "log.2", "log.3"}
    assert "line 39" in (tmp_path / "log").read_text()


def test_a_log_goes_on_at_stderr_when_its_file_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: each line became a traceback."""
    LogOptions(None, Path("/dev/full"), is_json=True).start("info")
    for number in range(3):
        logger.info("line %d", number)
    first, *lines = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert first.startswith("cannot log to /dev/full: No space left on device, so the log goes on here. Free some")
    assert lines == ["line 0", "line 1", "line 2"]
