"""Which runs a bootstrap node remembers: a list that anybody may ask for. Runs by invitation are not on it.

It has run ids alone. Manifests prove themselves, and heartbeats too, so that whoever asks looks for those in the DHT.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from peers.errors import SwarmUnreachableError
from peers.network.channel import PeerUnreachableError, RefusalError
from peers.network.daemon import peer_id_of
from peers.network.transport import CallHandler
from peers.values.manifest import RUN_ID

LIST_RUNS = "list-runs"  # name of the call; payload: how many runs to leave out, in decimals; answer: a run id a line
PAGE = 200  # runs in one answer
RUNS_LIMIT = 1000
"""Runs that are asked for at most."""
ASK_TIMEOUT = 20.0  # seconds
NUMBER = re.compile(rb"[0-9]{1,6}")


class Serving(Protocol):
    async def on_call(self, name: str, handler: CallHandler) -> None: ...


class Asking(Protocol):
    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes: ...


async def serve_catalogue(transport: Serving, run_ids: Callable[[], Iterable[str]]) -> None:
    """Answer whoever asks which runs there are. `run_ids` returns those that may be told, the newest first."""

    async def answer(sender: str, payload: bytes) -> bytes:
        if not NUMBER.fullmatch(payload):
            raise RefusalError("the number of runs to leave out is malformed")
        first = int(payload)
        return "\n".join(list(run_ids())[first : first + PAGE]).encode()

    await transport.on_call(LIST_RUNS, answer)


async def listed_runs(transport: Asking, addresses: Sequence[str], limit: int = RUNS_LIMIT) -> list[str]:
    """Return the ids of at most `limit` runs that the nodes at these addresses remember, each once.

    Raises: SwarmUnreachableError when none of the nodes lists any runs.
    """
    found: dict[str, None] = {}
    failures = []
    for address in addresses:
        try:
            for run_id in await _list_of(transport, peer_id_of(address), limit):
                found.setdefault(run_id)
        except PeerUnreachableError as error:
            failures.append(str(error).rstrip("."))
    if len(failures) == len(addresses):
        raise SwarmUnreachableError(
            f"nobody at the given addresses says which runs there are: {'; '.join(failures)}.",
            "Name a bootstrap node of this version; other peers remember no runs but their own.",
        )
    return list(found)[:limit]


async def _list_of(transport: Asking, peer_id: str, limit: int) -> list[str]:
    """Return what one node lists. Raises: PeerUnreachableError, also for an answer that is malformed."""
    run_ids: list[str] = []
    while len(run_ids) < limit:
        answer = await transport.call(peer_id, LIST_RUNS, str(len(run_ids)).encode(), ASK_TIMEOUT)
        page = answer.decode("ascii", errors="replace").split()
        if len(page) > PAGE or not all(map(RUN_ID.fullmatch, page)):
            raise PeerUnreachableError(peer_id, "its list of runs is malformed")
        run_ids += page
        if len(page) < PAGE:
            break
    return run_ids
