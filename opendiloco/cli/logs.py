"""Where log lines go, and how they look: for people or as JSON, each with the run, the peer and the outer step."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from opendiloco.errors import MachineError, fit_for_terminal
from peers.presence.allowances import Allowance

FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
FORMAT_WITH_PLACE = "%(asctime)s %(levelname)-7s %(place)s%(message)s"
OURS = ("opendiloco", "peers")
CHATTY = ("torchao", "torch.utils._pytree")
"""Libraries whose warnings are about their own builds, and nothing that a person could act on."""
FILE_BYTES, OLD_FILES = 10_000_000, 3
"""A log file is renamed when it has so many bytes; as many older ones are kept: .1 is the newest of them."""

OF_STRANGERS = "peers.network"
WARNINGS_AT_ONCE, WARNINGS_PER_SECOND = 30.0, 0.2  # of one place in the code


def _is_no_disconnect(record: logging.LogRecord) -> bool:
    """False for what asyncio logs, with a traceback, when a peer goes while hivemind is reading from it."""
    error = record.exc_info[1] if record.exc_info else None
    return not (record.name == "asyncio" and isinstance(error, EOFError | ConnectionError))


class _FloodGate:
    """A filter that holds back warnings, and all lines about the network, of one place in the code that come too fast:
    strangers choose how often."""

    def __init__(self) -> None:
        self._allowances: dict[tuple[str, int], Allowance] = {}
        self._left_out = Counter[tuple[str, int]]()

    def __call__(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged. The next one that is tells how many were not."""
        if record.levelno < logging.WARNING and not record.name.startswith(OF_STRANGERS):
            return True
        place = record.name, record.lineno
        allowance = self._allowances.setdefault(place, Allowance(WARNINGS_AT_ONCE, WARNINGS_PER_SECOND))
        if not allowance.has_some(record.created):
            self._left_out[place] += 1
            return False
        allowance.spend(1.0)
        if left_out := self._left_out.pop(place, 0):
            record.msg, record.args = f"{record.getMessage()} ({left_out} lines like this one were left out)", ()
        return True


@dataclass
class _LogPlace:
    """Where in which run this process is, as far as it knows yet."""

    run: str | None = None
    peer: str | None = None
    outer_step: Callable[[], int | None] = field(default=lambda: None)

    def fill(self, record: logging.LogRecord) -> bool:
        """Add the place to a record."""
        step = self.outer_step()
        known = {"run": self.run, "peer": self.peer, "outer_step": step}
        record.known = {name: value for name, value in known.items() if value is not None}
        run = self.run and self.run[: self.run.rfind("-") + 9]  # its name, and the beginning of its digest
        said = [run, self.peer and f"…{self.peer[-8:]}"]
        words = " ".join(filter(None, [*said, "" if step is None else f"#{step}"]))
        record.place = f"[{words}] " if words else ""
        return True


PLACE = _LogPlace()  # that of this process


class _JsonFormatter(logging.Formatter):
    """One object a line: `time`, `level`, `logger`, `message`, what is known of `run`, `peer` and `outer_step`, the
    `details` that whoever logs adds, and the `error` with its traceback, if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        said: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        said |= getattr(record, "known", {}) | getattr(record, "details", {})
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False)


class _PlainFormatter(logging.Formatter):
    """Lines for people, without control characters: peers and manifests have a say in some of them."""

    def format(self, record: logging.LogRecord) -> str:
        return fit_for_terminal(super().format(record).replace("\t", "    "))


@dataclass(frozen=True)
class LogOptions:
    """What the person asked for; None leaves it to the command."""

    level: str | None
    file: Path | None
    is_json: bool = False

    def start(self, default_level: str) -> None:
        """Log to stderr, or to the file. Other libraries' lines only count from warnings on, unless all is wanted.

        Raises: MachineError when the file cannot be written.
        """
        handler: logging.Handler = logging.StreamHandler()
        if self.file is not None:
            path = self.file.expanduser()
            try:
                handler = RotatingFileHandler(path, encoding="utf-8", maxBytes=FILE_BYTES, backupCount=OLD_FILES)
            except OSError as error:
                reason = error.strerror or str(error)
                raise MachineError(
                    f"cannot log to {self.file}: {reason}.", "Name a file that can be written."
                ) from error
        self.send_to(handler, default_level, FORMAT_WITH_PLACE)

    def send_to(self, handler: logging.Handler, default_level: str, format: str = FORMAT) -> None:
        """Log to a handler of the caller's."""
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
