"""Whether a machine begins with the weights that the run's manifest means. Needs no torch."""

from __future__ import annotations

import numpy as np

from opendiloco.config.model import ModelSection
from opendiloco.errors import MachineError
from opendiloco.shared_memory import Vector
from peers.errors import ManifestError
from peers.values.chunks import digest_of_state


def digest_of_weights(theta: Vector) -> str:
    """64 hexadecimal digits, of the values as fp32 in the model's order: whatever files they came from, in whatever
    pieces and precision."""
    return digest_of_state([theta.view(np.uint8).data]).hex()


def check_initial_weights(theta: Vector, section: ModelSection) -> None:
    """Compare the weights that a run begins with, as they are on this machine, with those that `section` names.

    Raises: MachineError when they differ; ManifestError when weights from elsewhere have no digest to compare with.
    """
    if section.digest is None:
        if section.path is not None:
            raise ManifestError(
                f"model.path = {section.path!r} comes without model.digest: peers could begin with different weights.",
                "The organiser makes the run with `diloco-peer run create`, which fills it in.",
            )
        return
    found = digest_of_weights(theta)
    if found != section.digest:
        origin = repr(section.path) if section.path else f"init_seed = {section.init_seed}"
        raise MachineError(
            f"the run begins with weights of digest {section.digest}; those of {origin} have {found} here.",
            "Get the model that the organiser means."
            if section.path
            else "Install the versions in constraints.txt, with which the same seed gives the same weights.",
        )
