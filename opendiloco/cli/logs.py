"""Where log lines go."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
OURS = ("opendiloco", "peers")


def is_no_disconnect(record: logging.LogRecord) -> bool:
    """False for what asyncio logs, with a traceback, when a peer goes while hivemind is reading from it."""
    error = record.exc_info[1] if record.exc_info else None
    return not (record.name == "asyncio" and isinstance(error, EOFError | ConnectionError))


@dataclass(frozen=True)
class LogOptions:
    """What the person asked for; None leaves it to the command."""

    level: str | None
    file: Path | None

    def start(self, default_level: str = "warning") -> None:
        """Log to stderr, or to the file. Other libraries' lines only count from warnings on, unless all is wanted.

        Raises: MachineError when the file cannot be written.
        """
        self.send_to(self._handler(), default_level)

    def send_to(self, handler: logging.Handler, default_level: str) -> None:
        """Log to a handler of the caller's."""
        level = (self.level or default_level).upper()
        if level != "DEBUG":
            handler.addFilter(is_no_disconnect)
        handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
        logging.basicConfig(handlers=[handler], level=level if level in ("DEBUG", "ERROR") else "WARNING", force=True)
        for name in OURS:
            logging.getLogger(name).setLevel(level)

    def _handler(self) -> logging.Handler:
        if self.file is None:
            return logging.StreamHandler()
        try:
            return logging.FileHandler(self.file, encoding="utf-8")
        except OSError as error:
            from opendiloco.errors import MachineError

            reason = error.strerror or str(error)
            raise MachineError(f"cannot log to {self.file}: {reason}.", "Name a file that can be written.") from error
