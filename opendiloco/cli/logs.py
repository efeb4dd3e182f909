"""The set-up of logging. Log lines are text or JSON, name the run, the peer and the outer step, and are written to
stderr or to a file."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from opendiloco.errors import MachineError, fit_for_terminal
from peers.errors import remedy_for
from peers.presence.allowances import Allowance

logger = logging.getLogger(__name__)
FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
FORMAT_WITH_PLACE = "%(asctime)s %(levelname)-7s %(place)s%(message)s"
OURS = ("opendiloco", "peers")
CHATTY = ("torchao", "torch.utils._pytree")
"""Libraries whose warnings are about their own builds, so that no person can act on them."""
FILE_BYTES, OLD_FILES = 10_000_000, 3
"""Size in bytes at which a log file is renamed, and the number of old files that are kept: .1 is the newest."""

ORDINARY = frozenset({"opendiloco.storage.checkpointer", "opendiloco.workers.telemetry"})
"""Modules that log in each outer step, which may be short."""
ORDINARY_SECONDS = 60.0  # least seconds between two messages of one line of code in an ORDINARY module
OF_STRANGERS = "peers.network"
WARNINGS_AT_ONCE, WARNINGS_PER_SECOND = 30.0, 0.2  # messages of one line of code: most at once, and most a second


def _is_no_disconnect(record: logging.LogRecord) -> bool:
    """Return False for the traceback that asyncio logs when a peer disconnects while hivemind reads from the
    connection."""
    error = record.exc_info[1] if record.exc_info else None
    return not (record.name == "asyncio" and isinstance(error, EOFError | ConnectionError))


class _FloodGate:
    """A log filter that drops messages if one line of code logs too many. It limits warnings and network messages,
    because strangers can cause these, and ordinary messages of outer steps."""

    def __init__(self) -> None:
        self._allowances: dict[tuple[str, int], Allowance] = {}
        self._left_out = Counter[tuple[str, int]]()

    def __call__(self, record: logging.LogRecord) -> bool:
        """Return True if the record is to be logged. The next record that the same line of code logs says how many were
        dropped."""
        is_ordinary = record.name in ORDINARY and record.levelno < logging.WARNING
        if not (is_ordinary or record.levelno >= logging.WARNING or record.name.startswith(OF_STRANGERS)):
            return True
        place = record.name, record.lineno
        limits = (1.0, 1 / ORDINARY_SECONDS) if is_ordinary else (WARNINGS_AT_ONCE, WARNINGS_PER_SECOND)
        allowance = self._allowances.setdefault(place, Allowance(*limits))
        if not allowance.has_some(record.created):
            self._left_out[place] += not is_ordinary
            return False
        allowance.spend(1.0)
        if left_out := self._left_out.pop(place, 0):
            record.msg, record.args = f"{record.getMessage()} ({left_out} similar lines were left out)", ()
        return True


@dataclass
class _LogPlace:
    """Adds this process's run, peer and outer step to its log records. Each is None while it is unknown."""

    run: str | None = None
    peer: str | None = None
    outer_step: Callable[[], int | None] = field(default=lambda: None)

    def fill(self, record: logging.LogRecord) -> bool:
        """Add the run, the peer and the outer step to a log record. Return True, because no record is dropped."""
        step = self.outer_step()
        known = {"run": self.run, "peer": self.peer, "outer_step": step}
        record.known = {name: value for name, value in known.items() if value is not None}
        run = self.run and self.run[: self.run.rfind("-") + 9]  # the run's name and the first 8 digits of its digest
        parts = [run, self.peer and f"…{self.peer[-8:]}", "" if step is None else f"#{step}"]
        words = " ".join(filter(None, parts))
        record.place = f"[{words}] " if words else ""
        return True


PLACE = _LogPlace()  # run, peer and outer step in this process's log lines


class _JsonFormatter(logging.Formatter):
    """A log formatter that writes one JSON object a line.

    Its keys are `time`, `level`, `logger` and `message`; `run`, `peer` and `outer_step` if known; the keys of the
    caller's `details`; and `error`, the traceback of an exception.
    """

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "known", {}) | getattr(record, "details", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _PlainFormatter(logging.Formatter):
    """A log formatter that writes text without control characters, because some messages quote peers and manifests."""

    def format(self, record: logging.LogRecord) -> str:
        return fit_for_terminal(super().format(record).replace("\t", "    "))


class _LogFile(RotatingFileHandler):
    """The file of --log-file. If a line cannot be written to it, that line and all later ones go to stderr."""

    _instead: logging.Handler | None = None

    def emit(self, record: logging.LogRecord) -> None:
        (self._instead.emit if self._instead else super().emit)(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        with suppress(OSError):  # closing writes the rest of the buffer
            self.close()
        self._instead = logging.StreamHandler()
        self._instead.setFormatter(self.formatter)
        remedy = f"{remedy_for(error, 'Name another one with --log-file.')} Then start again."
        reason = error.strerror or error
        logger.error("cannot log to %s: %s, so the log goes on here. %s", self.baseFilename, reason, remedy)
        self._instead.emit(record)


@dataclass(frozen=True)
class LogOptions:
    """The values of the logging options. If `level` is None, the command chooses the level; if `file` is None, log
    lines are written to stderr."""

    level: str | None
    file: Path | None
    is_json: bool = False

    def start(self, default_level: str) -> None:
        """Begin to log to the file of --log-file, or else to stderr.

        Messages of other libraries are logged from level warning on; with level debug, all of them. Raises:
        MachineError when the file cannot be written.
        """
        handler: logging.Handler = logging.StreamHandler()
        if self.file is not None:
            path = self.file.expanduser()
            try:
                handler = _LogFile(path, encoding="utf-8", maxBytes=FILE_BYTES, backupCount=OLD_FILES)
            except OSError as error:
                reason = error.strerror or str(error)
                raise MachineError(
                    f"cannot log to {self.file}: {reason}.",
                    remedy_for(error, "Name a file that can be written with --log-file."),
                ) from error
        self.send_to(handler, default_level, FORMAT_WITH_PLACE)

    def send_to(self, handler: logging.Handler, default_level: str, format: str = FORMAT) -> None:
        """Begin to log to `handler`, from the level of --log-level on, or from `default_level` on if that option is not
        given."""
        level = (self.level or default_level).upper()
        if level != "DEBUG":
            handler.addFilter(_is_no_disconnect)
            handler.addFilter(_FloodGate())
        handler.addFilter(PLACE.fill)
        handler.setFormatter(_JsonFormatter() if self.is_json else _PlainFormatter(format, datefmt="%H:%M:%S"))
        logging.basicConfig(handlers=[handler], level=level if level in ("DEBUG", "ERROR") else "WARNING", force=True)
        for name in CHATTY:
            logging.getLogger(name).setLevel("DEBUG" if level == "DEBUG" else "ERROR")
        for name in OURS:
            logging.getLogger(name).setLevel(level)
