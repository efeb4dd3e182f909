"""The command line of `diloco-peer`, in a process that kills itself when it has written its votes so often:
`python -m tests.swarm.dying_volunteer before|after NUMBER join …`.

Killed `before`, the vote is nowhere; `after`, it is on the disk, and nobody has heard of it.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count

from opendiloco.cli import main
from peers.log.votes import VotesFile


def die_at(moment: str, number: int) -> None:
    """Have this process kill itself at its n-th vote."""
    write, times = VotesFile.write, count(1)

    def write_and_die(self: VotesFile, record: bytes) -> None:
        is_last = next(times) == number
        if is_last and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, record)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)

    VotesFile.write = write_and_die  # type: ignore[method-assign]


if __name__ == "__main__":
    die_at(sys.argv[1], int(sys.argv[2]))
    main(sys.argv[3:], prog_name="diloco-peer")
