from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from opendiloco.config.data import SourceSection
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import BEGIN, END, PADDING, ByteTokenizer
from opendiloco.errors import MachineError
from opendiloco.model.build import build_model
from opendiloco.model.export import ROWS, CurvePoint, RunFacts, _model_card, _training, export_model

FACTS = RunFacts(
    run_id="small-abc", manifest_digest="cd" * 32, outer_steps=12, tokens=345678, peers=3, held_out_loss=2.15625
)


def test_an_exported_folder_loads_with_transformers_alone(small_config: RunConfig, tmp_path: Path) -> None:
    model = build_model(small_config, ByteTokenizer())
    export_model(model, ByteTokenizer(), tmp_path / "out" / "model", small_config, FACTS)
    folder = tmp_path / "out" / "model"
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "README.md"} <= {
        path.name for path in folder.iterdir()
    }
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[10, 20, 30]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "def naïve():\n\treturn  '→ 漢字'  # 😀\r\n"
    ids_of_text = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids_of_text == list(text.encode())
    assert tokenizer.decode(ids_of_text) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (BEGIN, END, PADDING)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == END
    assert json.loads((folder / "config.json").read_text())["bos_token_id"] == BEGIN


def test_whoever_may_read_the_configuration_may_read_the_weights(small_config: RunConfig, tmp_path: Path) -> None:
    """Regression: safetensors makes its file for its owner alone, whatever the umask says."""
    before = os.umask(0o027)
    try:
        export_model(build_model(small_config, ByteTokenizer()), ByteTokenizer(), tmp_path, small_config, FACTS)
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {
        path.name: oct(0o640) for path in tmp_path.iterdir()
    }


def test_the_model_card_states_the_runs_facts(small_config: RunConfig, tmp_path: Path) -> None:
    export_model(build_model(small_config, ByteTokenizer()), ByteTokenizer(), tmp_path, small_config, FACTS)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    for fact in (
        "small-abc",
        "cd" * 32,
        "| 12 |",
        "345,678",
        "| peers in the last outer step | 3 |",
        "2.1562 nats",
        "# license:",
    ):
        assert fact in card


def test_one_peer_is_one_peer(small_config: RunConfig) -> None:
    """Regression: the card of the first run that an organiser tries began with "1 peers trained"."""
    facts = FACTS.model_copy(update={"peers": 1, "contributors": 1, "knows_all": True})
    assert "\n1 peer trained 345,678 tokens" in _training(small_config, facts)
    facts = facts.model_copy(update={"knows_all": False})
    assert "\nat least 1 peer trained 345,678 tokens" in _training(small_config, facts)


def test_the_card_has_curve_data_contributors_and_the_command(small_config: RunConfig, tmp_path: Path) -> None:
    points = tuple(CurvePoint(outer_step=8 * step, loss=5 / (1 + step), tokens=100 * step) for step in range(300))
    known = {"bits_per_byte": 1.25, "contributors": 17, "curve": points, "versions": {"torch": "2.13"}}
    facts = FACTS.model_copy(update=known | {"command": "diloco-peer export --initial-peer ADDRESS --out model"})
    export_model(build_model(small_config, ByteTokenizer()), ByteTokenizer(), tmp_path, small_config, facts)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    for said in (
        "2.1562 nats per token, 1.2500 bits per byte",
        "| peers that contributed | at least 17 |",
        "| weights | float32 |",
        "| outer step | tokens | held-out loss |",
        "| 0 | 0 | 5.0000 |",
        "| 2392 | 29,900 | 0.0167 |",
        "| local text of each volunteer | 100.0% |",
        "Windows of 16 tokens. Tokenizer: bytes. Each document was held out\nwith probability 0.2 (`data.held_out`)",
        "```sh\ndiloco-peer export --initial-peer ADDRESS --out model\n```",
        "at least 17 peers trained 345,678 tokens in 12 outer steps.",
        "up to 4 inner steps at a time with adamw, in batches of\n2 windows, at a learning rate of up to 0.01.",
        "torch 2.13. Here `ADDRESS` is the address of one of the run's bootstrap nodes. ",
    ):
        assert said in card, said
    rows = card.partition("| held-out loss |\n")[2].partition("\n\n")[0].splitlines()
    assert len(rows) == 1 + ROWS
    assert str(small_config.data.source) not in card, "a folder of this machine's"
    hub = SourceSection(source="some/texts")
    assert "`some/texts` (split `train`)" in _model_card(small_config, facts.model_copy(update={"sources": (hub,)}))
    assert "The organiser then changed" not in card
    amended = _model_card(small_config, facts.model_copy(update={"amendments": ("after outer step 3: one", "two")}))
    assert "\nThe organiser then changed these values:\n\n- after outer step 3: one\n- two\n\n## How to" in amended
    assert "| share of the samples, before amendments |" in amended
    whole = _model_card(small_config, facts.model_copy(update={"knows_all": True}))
    assert "| peers that contributed | 17 |" in whole


def test_a_strangers_words_write_no_markdown_into_the_card(small_content: dict[str, Any]) -> None:
    words = "a`|\n# b</td>[c](d)"
    data = {"sources": [{"source": "some/texts", "subset": words}]}
    card = _model_card(RunConfig.model_validate(small_content | {"data": data}), FACTS)
    assert "| `some/texts` (subset `a # b/td[c](d)`, split `train`) | 100.0% |" in card


def test_the_card_says_what_the_organiser_says_of_the_run(small_content: dict[str, Any]) -> None:
    about = {
        "title": "Verse <b>",
        "description": "A model\u00a0of verse.".replace("\u00a0", " "),
        "licence": 'cc0-1.0"',
    }
    card = _model_card(RunConfig.model_validate(small_content | {"about": about}), FACTS)
    assert '\nlicense: "cc0-1.0\\""\n---\n\n# Verse b\n\nA model of verse.\n\nA language model' in card


def test_without_a_curve_the_card_has_none(small_config: RunConfig, tmp_path: Path) -> None:
    one = FACTS.model_copy(update={"curve": (CurvePoint(outer_step=12, loss=2.0),)})
    export_model(build_model(small_config, ByteTokenizer()), ByteTokenizer(), tmp_path, small_config, one)
    assert "## Training curve" not in (tmp_path / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("tied", [False, True])
def test_weights_in_bfloat16_are_rounded_and_the_model_keeps_its_own(
    small_content: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    model_config = small_content["model"]["config"] | {"tie_word_embeddings": tied}
    content = small_content | {"model": {"config": model_config, "init_seed": 3}}
    config = RunConfig.from_manifest_content(content)
    model = build_model(config, ByteTokenizer())
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    whole, half = tmp_path / "whole", tmp_path / "half"
    export_model(model, ByteTokenizer(), half, config, FACTS, "bfloat16")
    export_model(model, ByteTokenizer(), whole, config, FACTS)
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items())
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (half, whole)]
    assert sizes[0] < 0.6 * sizes[1]
    loaded = AutoModelForCausalLM.from_pretrained(half)
    assert loaded.dtype == torch.bfloat16
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, own[name].to(torch.bfloat16))
    assert AutoModelForCausalLM.from_pretrained(whole).dtype == torch.float32
    assert "| weights | bfloat16 |" in (half / "README.md").read_text()


def test_a_folder_with_something_in_it_is_left_alone(small_config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(MachineError, match="is not empty") as caught:
        export_model(None, ByteTokenizer(), tmp_path, small_config, FACTS)
    assert caught.value.remedy
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be written"):
        export_model(None, ByteTokenizer(), tmp_path / "file" / "model", small_config, FACTS)
