"""Freezing as in FedPart (arXiv 2410.23441): one fragment learns in each outer step, and is exchanged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from opendiloco.model.build import build_model
from opendiloco.training.inner import ModelReplica
from opendiloco.training.reference import Reference, Work


class FrozenReplica(ModelReplica):
    """A replica of which only one fragment learns. The others' moments stay as they are, too."""

    learning = 0

    def add_gradient(self, batch: NDArray[np.int64]) -> torch.Tensor:
        loss = super().add_gradient(batch)
        learning = {parameter.name for parameter in self.layout.fragment(self.learning)}
        for name, parameter in self._parameters().items():
            if name not in learning:
                parameter.grad = None
        return loss


class FreezingReference(Reference):
    """All replicas have the same fragment learn, for a whole cycle, from theta."""

    def outer_step(self, roster: Sequence[Work]) -> bytes:
        fragment = self.index % len(self.state.fragments)
        part, members = self.state.fragments[fragment], self.begin(roster)
        for member in members:
            assert isinstance(member.replica, FrozenReplica)
            member.replica.learning = fragment
            member.cycles.train_to_the_end(member.returned)
        self.synchronise(fragment, members)
        for member in members:
            member.get_back(part, self.state.theta[part])
        return self.end(members)

    def build_replica(self) -> FrozenReplica:
        model = build_model(self.config, self._tokenizer)
        return FrozenReplica(self.config, model, self._data.samples, layout=self.layout)
