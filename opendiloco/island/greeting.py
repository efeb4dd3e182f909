"""How machines of one volunteer know each other: by a secret in torchrun's store, and by what they must have alike."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from blake3 import blake3

from opendiloco.errors import IslandError
from opendiloco.island.frames import Ended
from opendiloco.island.store import StoreClient

SECRET_BYTES = 32
KEY_BYTES = 16
GREETING_SECONDS = 10.0
"""A machine that is not let in within this time dials again."""
TELLING_SECONDS = 20.0
"""For which we try to tell others that we leave; torchrun ends us 30 seconds after Ctrl-C."""
MUST_AGREE = ("diloco-peer", "torch", "transformers")


def versions() -> dict[str, str]:
    """Return the versions of what all machines must have alike."""
    found = {}
    for name in MUST_AGREE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def key_of(job: str) -> str:
    """Return under which key of torchrun's store the first machine says where it listens."""
    return f"diloco-peer/first-machine/{job}"


def end_key(secret: bytes) -> str:
    """Return under which key of torchrun's store a machine says that a start with this secret has come to nothing."""
    return f"diloco-peer/ended/{blake3(secret).hexdigest(KEY_BYTES)}"


def proof(secret: bytes, challenge: bytes) -> str:
    """Return what shows that a machine knows the secret: a node of the first machine's challenge, the first machine of
    that and the node's."""
    return str(blake3(challenge, key=secret).hexdigest())


async def tell_end(store: StoreClient, secret: bytes, ended: Ended) -> None:
    """Say in the store that a start has come to nothing, as far as it can still be reached."""
    with suppress(IslandError, TimeoutError):
        await asyncio.wait_for(store.set(end_key(secret), ended.packed().decode()), TELLING_SECONDS)
