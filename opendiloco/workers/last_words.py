"""What a worker prints: kept for when it dies, and shown as it comes to whoever looks at everything."""

from __future__ import annotations

import logging
import re
from collections import deque

logger = logging.getLogger(__name__)

LINES_KEPT = 60
"""As many as a traceback through torch has."""
LINE_LENGTH = 500
IN_A_SENTENCE = 3
"""Lines that an error repeats, the last ones; the log has all that were kept."""
TERMINAL_COMMANDS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class LastWords:
    """The last lines that a worker has printed, fit for a terminal: without colours, progress bars as they ended."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)

    def heard(self, line: str) -> None:
        """Take a line."""
        plain = TERMINAL_COMMANDS.sub("", line).rstrip().rpartition("\r")[2].replace("\t", "    ")[:LINE_LENGTH]
        shown = "".join(character if character.isprintable() else " " for character in plain)
        if shown.strip():
            self._lines.append(shown)
            logger.debug("the worker says: %s", shown)

    def sentence(self) -> str:
        """Return the last lines as the end of an error's message; nothing if there are none."""
        lines = [line.strip() for line in self._lines][-IN_A_SENTENCE:]
        return f" Its last words: {' | '.join(lines)}" if lines else ""

    def log(self, name: str) -> None:
        """Log all that was kept."""
        if self._lines:
            logger.error("%s printed last:\n%s", name, "\n".join(f"    {line}" for line in self._lines))
