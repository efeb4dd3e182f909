from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenized import Windows
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import HeldOutWindows
from opendiloco.model.build import build_model
from opendiloco.model.evaluation import generate_sample, held_out_loss


def test_a_model_that_knows_nothing_loses_the_logarithm_of_its_vocabulary(small_config: RunConfig) -> None:
    model = build_model(small_config, ByteTokenizer())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    windows = HeldOutWindows([Windows(np.arange(163, dtype=np.uint16) % 256, sequence_length=16)])
    loss, tokens = held_out_loss(model, windows, windows=100, batch_size=3)
    assert loss == pytest.approx(math.log(259), rel=1e-6)
    assert tokens == 10 * 16


def test_few_windows_are_spread_over_the_text_and_batches_do_not_matter(small_config: RunConfig) -> None:
    model = build_model(small_config, ByteTokenizer())
    tokens_of_text = np.random.default_rng(0).integers(0, 256, 1601).astype(np.uint16)
    windows = HeldOutWindows([Windows(tokens_of_text, sequence_length=16)])
    loss, tokens = held_out_loss(model, windows, windows=7, batch_size=3)
    assert tokens == 7 * 16
    assert held_out_loss(model, windows, windows=7, batch_size=7)[0] == pytest.approx(loss, rel=1e-5)
    first_seven, _ = held_out_loss(model, HeldOutWindows([Windows(tokens_of_text[: 7 * 16 + 1], 16)]), 7, 7)
    assert first_seven != loss


def test_samples_are_the_same_for_the_same_seed(small_config: RunConfig) -> None:
    model = build_model(small_config, ByteTokenizer())
    first = generate_sample(model, ByteTokenizer(), "peers", 10, seed=1)
    assert first == generate_sample(model, ByteTokenizer(), "peers", 10, seed=1)
    assert first != generate_sample(model, ByteTokenizer(), "peers", 10, seed=2)
    assert generate_sample(model, ByteTokenizer(), "", 5, seed=0)
