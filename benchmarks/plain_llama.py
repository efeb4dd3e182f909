"""A Llama model written by hand for training only, in the manner of nanochat: without cache, masks or hooks.

It has the parameters of transformers' model of the same configuration, under the same names, and computes the same
result. The difference in speed is the cost of transformers' generality.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self._eps)


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self._heads, self._shared, self._width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self._heads * self._width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self._shared * self._width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self._shared * self._width, bias=False)
        self.o_proj = nn.Linear(self._heads * self._width, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        windows, length, _ = x.shape
        # q, k and v have the shape (windows, heads, tokens, head width).
        q = self.q_proj(x).view(windows, length, self._heads, self._width).transpose(1, 2)
        k = self.k_proj(x).view(windows, length, self._shared, self._width).transpose(1, 2)
        v = self.v_proj(x).view(windows, length, self._shared, self._width).transpose(1, 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self._shared != self._heads)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).reshape(windows, length, -1))
        return out


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `x` with rotary position embedding (RoPE): each pair of values, one from each half of a head, is rotated
    by an angle that grows with the position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(config.max_position_embeddings), frequencies)  # shape: (positions, width / 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)  # shape: (windows, tokens, hidden size)
        if torch.is_autocast_enabled(x.device.type):  # keeps the residual sums in autocast's precision
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.layers:
            x = block(x, cos, sin)
        out: torch.Tensor = self.norm(x)
        return out


class PlainLlama(nn.Module):
    """A Llama model as a torch module. Raises: ValueError for a configuration that `PlainLlama` does not support."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        if wrong := unknown(config):
            raise ValueError(f"the model by hand does not support {wrong}")
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def like(cls, model: Any) -> PlainLlama:
        """Return a `PlainLlama` with the weights of a transformers model. Raises: ValueError if `PlainLlama` does not
        support the model's configuration."""
        ours = cls(model.config)
        ours.load_state_dict(model.state_dict())
        return ours

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.model(ids))
        return logits


def unknown(config: Any) -> str | None:
    """Return as text the first setting of a configuration that `PlainLlama` does not support, or None if all are
    supported."""
    expected = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    expected |= {"attention_dropout": 0.0, "pretraining_tp": 1}
    for name, value in expected.items():
        if getattr(config, name) != value:
            return f"{name} = {getattr(config, name)!r}"
    kind = config.rope_parameters["rope_type"]
    return None if kind == "default" else f"rope_type = {kind!r}"
