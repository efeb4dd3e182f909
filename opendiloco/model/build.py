"""The transformers model of a run, and its place in flat fp32 vectors.

Every peer builds the initial weights itself, so these must be the same bits on every machine, hence `PortableNormal`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opendiloco.config.run_config import RunConfig, misfit
from opendiloco.config.streaming import StreamingSection
from opendiloco.data.pretrained_folder import CONFIG, MODEL_FILES, check_weights, model_values, pretrained_folder
from opendiloco.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer
from opendiloco.errors import first_line
from opendiloco.model.fragments import assign_fragments
from opendiloco.model.layout import Layout
from opendiloco.model.light_transformers import load_transformers
from opendiloco.model.packing import check_document_mask
from opendiloco.model.portable_normal import PortableNormal, Undrawn
from opendiloco.model.rehearsal import rehearse
from opendiloco.model.shards import Shards
from opendiloco.shared_memory import VALUE_BYTES, Vector, check_available
from peers.errors import DilocoPeerError, ManifestError
from peers.values.wire import printable

transformers = load_transformers()
AutoConfig, AutoModelForCausalLM = transformers.AutoConfig, transformers.AutoModelForCausalLM

PLAIN = StreamingSection()
FOLDERS = (
    "Give a hub name, or a folder as ./folder or /folder, with weights as safetensors; on a machine without internet, "
    "a folder."
)
_rehearsed: set[str] = set()
"""What has been found to be buildable in this process."""


@dataclass(frozen=True)
class _Source:
    """What a model is made from: the values of its config, and the folder of weights unless the run draws them."""

    values: dict[str, Any]
    folder: Path | None
    refusal: str
    remedy: str

    @classmethod
    def of(cls, config: RunConfig, tokenizer: Tokenizer) -> _Source:
        """Return that of a run. Of what lies on the hub, only the config is fetched. Raises: ManifestError."""
        path, values = config.model.path, config.model.config or {}
        if path is None:
            source = cls(
                values | tokenizer.special, None, "model.config: transformers refuses it", "Correct that value."
            )
            known = source._known_architecture()
            _refuse_unknown_keys(known, values)
            twice = next((key for key in tokenizer.special if key in values), None)
            if twice is not None:
                raise ManifestError(f"model.config.{twice} follows from the tokenizer.", "Remove it.")
            return source
        source = cls({}, None, f"model.path = {path!r} cannot be loaded", FOLDERS)
        with source.explained():
            folder = pretrained_folder(path, CONFIG)
            source = replace(source, values=model_values(folder), folder=folder)
        source._known_architecture()
        return source

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raises: ManifestError for what goes wrong meanwhile: each architecture has its own ways to object."""
        try:
            yield
        except (MemoryError, DilocoPeerError):
            raise
        except Exception as error:
            raise ManifestError(f"{self.refusal}: {first_line(error)}", self.remedy) from error

    def config(self) -> Any:
        """Return the config as transformers has it."""
        if self.folder is None:
            return AutoConfig.for_model(**self.values)
        return AutoConfig.from_pretrained(self.folder, trust_remote_code=False, local_files_only=True)

    def build(self, drawing: TorchDispatchMode) -> Any:
        """Return the model with the weights that are drawn."""
        with self.explained(), drawing:
            return AutoModelForCausalLM.from_config(self.config(), trust_remote_code=False)

    def load(self, path: str) -> Any:
        """Return the model with the weights of the folder."""
        with self.explained():
            folder = pretrained_folder(path, *MODEL_FILES)
            check_weights(folder)
            return AutoModelForCausalLM.from_pretrained(
                folder,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,  # others: pickles
            )

    def _known_architecture(self) -> Any:
        """Return the architecture's default config, and import its modules. Raises: ManifestError without one."""
        model_type = str(self.values.get("model_type"))
        try:
            known = AutoConfig.for_model(model_type)
        except ValueError:
            key = "model.config.model_type" if self.folder is None else f"{self.folder / CONFIG}: model_type"
            raise ManifestError(
                f"{key} = {model_type!r}: transformers knows no such architecture.",
                'Name a causal language model, e.g. "llama".',
            ) from None
        AutoModelForCausalLM._model_mapping.get(type(known), None)
        return known


def build_skeleton(config: RunConfig, tokenizer: Tokenizer) -> Any:
    """Return the model without values, on the meta device, which takes neither the memory nor the time of its weights.

    Raises: ManifestError as `build_model` would, or when even this takes too much.
    """
    return _skeleton_of(_Source.of(config, tokenizer), config, tokenizer)


def _skeleton_of(source: _Source, config: RunConfig, tokenizer: Tokenizer) -> Any:
    """Return the skeleton of a source, which a process with limits builds first: it may have any number of layers.

    All that builds a run's model comes through here.
    """

    def lay_out() -> Any:
        with torch.device("meta"):
            model = source.build(PortableNormal(config.model.init_seed))
        _check_fit(model, config, tokenizer)
        return model.float()

    tried = json.dumps([config.to_manifest_content(), tokenizer.size, source.values])
    if tried not in _rehearsed:
        rehearse(lay_out, "model.path" if config.model.path else "model.config")
        _rehearsed.add(tried)
    return lay_out()


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
    source = _Source.of(config, tokenizer)
    check_available("Building this model", _bytes_to_build(_skeleton_of(source, config, tokenizer)))
    if config.model.path:
        model = source.load(config.model.path)
    else:
        torch.manual_seed(config.model.init_seed)
        model = source.build(PortableNormal(config.model.init_seed, weights, threads) if draws else Undrawn())  # type: ignore[no-untyped-call]
    _check_fit(model, config, tokenizer)
    model = model.float()
    if config.training.document_mask:
        check_document_mask(model)
    return model


def _bytes_to_build(skeleton: Any) -> int:
    """Return the memory in which a model is built: that of its parameters and of its buffers, such as the masks of some
    architectures with the square of the positions, and of two copies of the largest, as constructors make them."""
    buffers = [each.nbytes for each in skeleton.buffers()]
    parameters = VALUE_BYTES * sum(each.numel() for each in skeleton.parameters())
    return int(parameters + sum(buffers) + 2 * max(buffers, default=0))


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


def _refuse_unknown_keys(known: Any, values: dict[str, Any]) -> None:
    """transformers keeps unknown keys in silence, and a misspelt size would silently be the default."""
    for key in values.keys() - {"model_type"}:
        if not hasattr(known, key):
            close = difflib.get_close_matches(key, list(vars(known)), n=1)
            remedy = f"Did you mean {close[0]}?" if close else "Remove it."
            said = printable(f"model.config.{key} = {values[key]!r}")
            raise ManifestError(f"{said}: {known.model_type} has no such setting.", remedy)


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
