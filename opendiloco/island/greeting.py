"""How machines of one volunteer know each other: by a secret in torchrun's store, and by what they must have alike."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from blake3 import blake3

SECRET_BYTES = 32
GREETING_SECONDS = 10.0
"""A machine that is not let in within this time dials again."""
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


def proof(secret: bytes, challenge: bytes) -> str:
    """Return what shows that a machine knows the secret: a node of the first machine's challenge, the first machine of
    that and the node's."""
    return str(blake3(challenge, key=secret).hexdigest())
