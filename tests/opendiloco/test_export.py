from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import BEGIN, END, PADDING, ByteTokenizer
from opendiloco.errors import MachineError
from opendiloco.model.build import build_model
from opendiloco.model.export import RunFacts, export_model

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


def test_a_folder_with_something_in_it_is_left_alone(small_config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(MachineError, match="is not empty") as caught:
        export_model(None, ByteTokenizer(), tmp_path, small_config, FACTS)
    assert caught.value.remedy
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be written"):
        export_model(None, ByteTokenizer(), tmp_path / "file" / "model", small_config, FACTS)
