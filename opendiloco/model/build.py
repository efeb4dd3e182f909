"""The transformers model of a run, and its place in flat fp32 vectors.

Every peer builds the initial weights itself, so these must be the same bits on every machine, hence `PortableNormal`.
"""

from __future__ import annotations

import difflib
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opendiloco.config.run_config import RunConfig, misfit
from opendiloco.config.streaming import StreamingSection
from opendiloco.data.downloads import downloading_model
from opendiloco.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer
from opendiloco.errors import first_line
from opendiloco.model.fragments import assign_fragments
from opendiloco.model.layout import Layout
from opendiloco.model.light_transformers import load_transformers
from opendiloco.model.packing import check_document_mask
from opendiloco.model.portable_normal import PortableNormal, Undrawn
from opendiloco.model.shards import Shards
from opendiloco.shared_memory import Vector
from peers.errors import ManifestError

transformers = load_transformers()
AutoConfig, AutoModelForCausalLM = transformers.AutoConfig, transformers.AutoModelForCausalLM

PLAIN = StreamingSection()


def build_skeleton(config: RunConfig, tokenizer: Tokenizer) -> Any:
    """The model without values, on the meta device: whether it can be built is found out without the memory or time
    that its weights take. Raises: ManifestError as `build_model` would."""
    with torch.device("meta"):
        if config.model.path:
            model = AutoModelForCausalLM.from_config(_load(AutoConfig, config.model.path))
        else:
            model = _from_config(config, tokenizer, PortableNormal(config.model.init_seed))
    _check_fit(model, config, tokenizer)
    return model.float()


def sized_skeleton(config: RunConfig) -> Any:
    """Return the model without values, for its size alone: no tokenizer is fetched. Raises: see `build_skeleton`;
    DataError without the file of the run's tokenizer."""
    tokenizer: Tokenizer = ByteTokenizer()  # what it is makes no difference to the model's size
    if config.tokenizer.kind == "file":
        tokenizer = build_tokenizer(config.tokenizer)  # but a vocabulary may be smaller than that of bytes
    return build_skeleton(config, tokenizer)


def build_model(
    config: RunConfig, tokenizer: Tokenizer, weights: int | None = None, draws: bool = True, threads: int | None = None
) -> Any:
    """The run's causal language model in fp32 on the CPU, with its initial weights. If it is known that these are so
    many values, whoever watches is told how many have been drawn.

    Unless it `draws`, zeros stand where values would be drawn: for who loads theta into it, all of whose parameters are
    trained. To draw 10 billion takes two minutes of CPU time, shared out among `threads` (None: see `draw`).

    Raises: ManifestError when transformers does not know such a model, or it does not fit the windows and tokens, or
    cannot keep documents apart where it should.
    """
    path = config.model.path
    drawing = PortableNormal(config.model.init_seed, weights, threads) if draws else Undrawn()  # type: ignore[no-untyped-call]
    model = _load(AutoModelForCausalLM, path) if path else _from_config(config, tokenizer, drawing)
    _check_fit(model, config, tokenizer)
    model = model.float()
    if config.training.document_mask:
        check_document_mask(model)
    return model


def initial_theta(config: RunConfig) -> Vector:
    """The weights that a run begins with, as every peer has them before the first entry.

    Raises: see `build_model`; DataError when the tokenizer cannot be had.
    """
    model = build_model(config, build_tokenizer(config.tokenizer))
    layout = layout_of(model, config.streaming)
    theta: Vector = np.zeros(layout.size, np.float32)
    store_weights(model, layout, theta)
    return theta


def store_weights(model: Any, layout: Layout, flat: Vector) -> None:
    """Write a whole model's trained weights where its layout has them."""
    Shards(layout).store(trainable(model), flat)


def _check_fit(model: Any, config: RunConfig, tokenizer: Tokenizer) -> None:
    settings = model.config
    positions = getattr(settings, "max_position_embeddings", None)
    problem = misfit(positions, settings.vocab_size, config, tokenizer.size)
    if problem:
        raise ManifestError(f"{problem}.")
    fragments, steps = len(layout_of(model, config.streaming).fragments), config.training.inner_steps
    if fragments > steps:
        raise ManifestError(
            f"the model's {fragments} fragments are more than training.inner_steps = {steps}, and each is synchronised "
            "at an inner step of its own.",
            "Raise streaming.layers_per_fragment or training.inner_steps.",
        )


def _load(kind: type[Any], path: str) -> Any:
    has_weights = kind is AutoModelForCausalLM
    try:
        with downloading_model(path, *(["*.safetensors"] if has_weights else [])):
            return kind.from_pretrained(path, **({"use_safetensors": True} if has_weights else {}))  # others: pickles
    except (OSError, ValueError) as error:
        raise ManifestError(
            f"model.path = {path!r} cannot be loaded: {first_line(error)}",
            "Give a model's folder or hub name, with weights as safetensors; on a machine without internet, a folder.",
        ) from error


def _from_config(config: RunConfig, tokenizer: Tokenizer, drawing: TorchDispatchMode) -> Any:
    values = dict(config.model.config or {})
    model_type = str(values.pop("model_type"))
    _refuse_unknown_keys(model_type, values)
    torch.manual_seed(config.model.init_seed)
    try:
        with drawing:
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **tokenizer.special, **values))
    except Exception as error:  # each architecture has its own ways to object
        cause = f"model.config: transformers refuses it: {first_line(error)}"
        raise ManifestError(cause, "Correct that value.") from error


def _refuse_unknown_keys(model_type: str, values: dict[str, Any]) -> None:
    """transformers keeps unknown keys in silence, and a misspelt size would silently be the default."""
    try:
        known = AutoConfig.for_model(model_type)
    except ValueError:
        raise ManifestError(
            f"model.config.model_type = {model_type!r}: transformers knows no such architecture.",
            'Name a causal language model, e.g. "llama".',
        ) from None
    for key in values:
        if not hasattr(known, key):
            close = difflib.get_close_matches(key, list(vars(known)), n=1)
            remedy = f"Did you mean {close[0]}?" if close else "Remove it."
            raise ManifestError(f"model.config.{key} = {values[key]!r}: {model_type} has no such setting.", remedy)


def layout_of(model: torch.nn.Module, streaming: StreamingSection = PLAIN) -> Layout:
    """The model's trainable parameters as a `Layout`, in the fragments of a run.

    Raises: ManifestError when these are not as large as the run says; see also `assign_fragments`.
    """
    trained = trainable(model)
    shapes = [(name, tuple(parameter.shape)) for name, parameter in trained.items()]
    layout = Layout(shapes, assign_fragments(model, trained, streaming))
    sizes = tuple(part.stop - part.start for part in layout.fragments)
    if streaming.sizes not in (None, sizes):
        raise ManifestError(
            f"streaming.sizes: the run's fragments have {streaming.sizes} values, those of its model here {sizes}.",
            "Compare the version of transformers with other peers'. Who creates a run leaves `sizes` out.",
        )
    return layout


def with_sizes_named(config: RunConfig) -> RunConfig:
    """Return the run with the sizes of its fragments, if it has several.

    Raises: ManifestError when it names others, or the model has no blocks; see also `sized_skeleton`.
    """
    if config.streaming.layers_per_fragment is None:
        return config
    layout = layout_of(sized_skeleton(config), config.streaming)
    sizes = tuple(part.stop - part.start for part in layout.fragments)
    content = config.to_manifest_content()
    return RunConfig.from_manifest_content(content | {"streaming": content["streaming"] | {"sizes": list(sizes)}})


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Those that are trained, by name; tied ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def is_all_trained(model: torch.nn.Module) -> bool:
    """Whether theta has all of the model's parameters."""
    return all(parameter.requires_grad for parameter in model.parameters())
