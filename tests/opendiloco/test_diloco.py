"""What one's own loop begins with. (tests/examples has it in a swarm.)"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.diloco import initial_vectors
from opendiloco.errors import MachineError
from opendiloco.model.build import build_model, initial_theta, layout_of
from opendiloco.model.layout import Layout
from peers.errors import ManifestError


@pytest.fixture
def layout(small_config: RunConfig) -> Layout:
    return layout_of(build_model(small_config, ByteTokenizer()))


def renamed(layout: Layout) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"transformer.{place.name}", place.shape) for place in layout]


def test_a_model_of_the_same_shapes_begins_with_the_runs_weights(small_config: RunConfig, layout: Layout) -> None:
    vectors = initial_vectors(small_config, Layout(renamed(layout)))
    assert np.array_equal(vectors.theta, initial_theta(small_config))


def test_another_model_is_refused_by_its_first_difference(small_config: RunConfig, layout: Layout) -> None:
    places = renamed(layout)
    name, shape = places[1]
    with pytest.raises(ManifestError, match=rf"parameter {name} has the shape \({shape[0]}, 3\)"):
        initial_vectors(small_config, Layout([places[0], (name, (shape[0], 3)), *places[2:]]))
    with pytest.raises(ManifestError, match=f"the run's has {layout.size}"):
        initial_vectors(small_config, Layout(places[:-1]))


def test_weights_that_differ_from_the_organisers_are_refused(small_content: dict[str, Any], layout: Layout) -> None:
    model = small_content["model"] | {"digest": "ab" * 32}
    with pytest.raises(MachineError, match="begins with weights of digest abab"):
        initial_vectors(RunConfig.from_manifest_content(small_content | {"model": model}), layout)
