"""A volunteer that begins anew after a long pause: as a fresh process in the place of this one.

So all memory is free while it is paused, that of GPUs and of libraries, too. The process id, the terminal and the
command line stay; what the owner has asked for goes along in the environment.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from opendiloco.owner.wishes import Wishes
from peers.net.signals import LEAVE_SIGNALS

WISHES_VARIABLE = "_DILOCO_PEER_WISHES"
OWNERS_SIGNALS = (*LEAVE_SIGNALS, signal.SIGUSR1)


def begin_again(wishes: Wishes, until: datetime | None = None) -> NoReturn:
    """Become a new process with the same command line. Signals wait until it listens (see `listen_again`).

    `until` is the moment that --until has come to mean: "07:30" would be another one tomorrow.
    """
    moment = None if until is None else until.isoformat()
    said = json.dumps({"is_asked": wishes.is_asked, "overruled": sorted(wishes.overruled), "until": moment})
    signal.pthread_sigmask(signal.SIG_BLOCK, OWNERS_SIGNALS)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {WISHES_VARIABLE: said})


def listen_again() -> None:
    """Let signals through that came while this process began."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OWNERS_SIGNALS)


def remembered_wishes(environment: Mapping[str, str]) -> Wishes:
    """Return what the owner had asked for before this process began again."""
    said = _remembered(environment)
    return Wishes(bool(said.get("is_asked")), said.get("overruled", ()))


def remembered_until(environment: Mapping[str, str]) -> datetime | None:
    """Return when to leave, as it was resolved before this process began again; None: it has not."""
    moment = _remembered(environment).get("until")
    return None if moment is None else datetime.fromisoformat(moment)


def _remembered(environment: Mapping[str, str]) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(environment.get(WISHES_VARIABLE) or "{}")
    return said
