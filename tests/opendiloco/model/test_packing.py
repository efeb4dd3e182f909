"""Documents that are packed into a window know nothing of one another."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from opendiloco.config.run_config import RunConfig
from opendiloco.data.sample_order import HeldOutWindows, Windows
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.model.build import build_model
from opendiloco.model.loss import (
    _document_positions,
    check_document_mask,
    packing_known,
    predicted_tokens,
    router_loss_weight,
    window_loss,
)
from opendiloco.training.evaluation import held_out_loss
from opendiloco.training.inner import ModelReplica
from peers.errors import ManifestError

END = ByteTokenizer.end
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 1},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "router_aux_loss_coef": 0.25}
# Two whole documents, one of a single token, an empty one, and the beginning of another.
DOCUMENTS = [[72, 101, 108, 108, 111, END], [87, 111, 114, 108, 100, 33, END], [88, END], [END], [65, 66, 67, 68]]


def content_of(small_content: dict[str, Any], family: str, mask: bool) -> dict[str, Any]:
    content = copy.deepcopy(small_content)
    content["training"]["document_mask"] = mask
    if family == "gpt2":
        content["model"]["config"] = {"model_type": "gpt2", "vocab_size": 259}
    content["model"]["config"] |= {"model_type": family} | FAMILIES.get(family, EXPERTS)
    return content


def model_of(small_content: dict[str, Any], family: str, mask: bool = True) -> Any:
    model = build_model(RunConfig.from_manifest_content(content_of(small_content, family, mask)), ByteTokenizer())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # or else attention, and what it changes, would be small
    return model.eval()


def packed() -> torch.Tensor:
    return torch.tensor([sum(DOCUMENTS, [])])  # noqa: RUF017


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_document_has_the_logits_that_it_has_alone(small_content: dict[str, Any], family: str) -> None:
    model, inputs = model_of(small_content, family), packed()
    with torch.no_grad():
        together = model(input_ids=inputs, position_ids=_document_positions(inputs, END), use_cache=False).logits[0]
        alone = torch.cat([model(input_ids=torch.tensor([one]), use_cache=False).logits[0] for one in DOCUMENTS])
        unmasked = model(input_ids=inputs, use_cache=False).logits[0]
    assert torch.allclose(together, alone, rtol=0, atol=1e-4)
    assert not torch.allclose(unmasked, alone, rtol=0, atol=1e-2)
    assert alone.abs().max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_its_loss_is_that_of_the_documents_alone(small_content: dict[str, Any], family: str) -> None:
    """And of windows without a boundary in the same batch."""
    model = model_of(small_content, family)
    plain = torch.arange(40, 40 + packed().shape[1])[None]
    with torch.no_grad():
        loss = window_loss(model, torch.cat([packed(), plain]), END)
        parts = [torch.tensor([one]) for one in DOCUMENTS if len(one) > 1] + [plain]
        alone = [window_loss(model, part) * (part.shape[1] - 1) for part in parts]
    predicted = sum(part.shape[1] - 1 for part in parts)
    assert predicted_tokens(torch.cat([packed(), plain]).numpy(), END) == predicted
    assert loss.item() == pytest.approx(sum(alone).item() / predicted, rel=1e-5)  # type: ignore[union-attr]


def test_without_a_mask_the_loss_is_to_the_bit_what_it_was(small_content: dict[str, Any]) -> None:
    model, windows = model_of(small_content, "llama", mask=False), packed()
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
    assert torch.equal(window_loss(model, windows), expected)
    assert not torch.equal(window_loss(model, windows, END), expected)


def test_positions_begin_anew_after_each_end() -> None:
    inputs = torch.tensor([[5, 6, END, 7, END, END, 8, 9], [END, 1, 2, 3, 4, 5, 6, END]])
    assert _document_positions(inputs, END).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6]]


def test_windows_of_empty_documents_teach_nothing(small_content: dict[str, Any]) -> None:
    model = model_of(small_content, "llama")
    loss = window_loss(model, torch.full((2, 9), END), END)
    loss.backward()
    assert loss.item() == 0
    assert all(parameter.grad.abs().max() == 0 for parameter in model.parameters() if parameter.grad is not None)


def test_evaluation_weighs_each_predicted_token_alike(small_content: dict[str, Any]) -> None:
    model = model_of(small_content, "llama")
    tokens = np.random.default_rng(0).integers(0, 256, 161).astype(np.uint16)
    tokens[:80:5] = END
    windows = HeldOutWindows([Windows(tokens, 16)], document_end=END)
    loss, predicted = held_out_loss(model, windows, windows=10, batch_size=3)
    assert predicted == 160 - np.count_nonzero(tokens[:160] == END)
    assert held_out_loss(model, windows, windows=10, batch_size=10)[0] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("routers", [{}, {"output_router_logits": True}, {"router_aux_loss_coef": 0.0}])
def test_training_a_mixture_of_experts_has_the_routers_loss_and_evaluation_never(
    small_content: dict[str, Any], mask: bool, routers: dict[str, Any]
) -> None:
    content = content_of(small_content, "mixtral", mask)
    content["model"]["config"] |= routers
    config = RunConfig.from_manifest_content(content)
    data = load_data(config, ByteTokenizer())
    replica, windows = ModelReplica(config, build_model(config, ByteTokenizer()), data.samples), packed()
    positions = {"position_ids": _document_positions(windows[:, :-1], END)} if mask else {}
    end, weight = END if mask else None, routers.get("router_aux_loss_coef", 0.25)
    asked = {"output_router_logits": True, "use_cache": False}
    uneven = replica.model(input_ids=windows[:, :-1], **asked, **positions).aux_loss
    assert uneven > 1
    plain = window_loss(replica.model, windows, end)
    assert replica.loss(windows).item() == pytest.approx((plain + weight * uneven).item(), rel=1e-6)
    evaluated, _ = held_out_loss(replica.model, data.held_out, 2, 2)
    held_out = torch.from_numpy(data.held_out.read(data.held_out.spread(2)))
    assert evaluated == pytest.approx(window_loss(replica.model, held_out, end).item(), rel=1e-6)


def test_the_routers_loss_of_a_model_without_routers_is_nothing(small_content: dict[str, Any]) -> None:
    assert router_loss_weight(model_of(small_content, "llama")) == 0


class Forgetful(torch.nn.Module):
    """An architecture that takes positions, and attends over all that came before nevertheless."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> Any:
        return self.model(input_ids=input_ids, use_cache=use_cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_architecture_that_mixes_documents_is_refused(small_content: dict[str, Any], family: str) -> None:
    model = model_of(small_content, family, mask=False)
    check_document_mask(model.train())
    assert model.training
    with pytest.raises(ManifestError, match=rf"document_mask = true: {family} does not keep packed documents apart"):
        check_document_mask(Forgetful(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_noticed_with_initial_weights_too(small_content: dict[str, Any], family: str) -> None:
    content = content_of(small_content, family, mask=False)
    model = build_model(RunConfig.from_manifest_content(content), ByteTokenizer())
    with pytest.raises(ManifestError, match="document_mask"):
        check_document_mask(Forgetful(model))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_model_that_is_told_of_documents_computes_what_it_finds_by_itself(
    small_content: dict[str, Any], family: str, is_packed: bool
) -> None:
    model, windows = model_of(small_content, family), torch.cat([packed(), packed().flip(1)])
    if not is_packed:
        windows = windows % END
    with torch.no_grad():
        found = window_loss(model, windows, END)
        with packing_known(is_packed):
            assert torch.equal(window_loss(model, windows, END), found)
        assert torch.equal(window_loss(model, windows, END), found)
        with packing_known(True):  # whatever a window has in it
            assert torch.allclose(window_loss(model, windows, END), found)
