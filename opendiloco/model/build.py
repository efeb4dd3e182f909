"""The transformers model of a run, and its initial weights as a flat fp32 vector.

Every peer builds the initial weights itself, so these must be the same bits on every machine, hence `_PortableNormal`.
"""

from __future__ import annotations

import ctypes
import difflib
import gc
import json
import os
import resource
import select
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from opendiloco.config.run_config import RunConfig, misfit
from opendiloco.cores import usable_cores
from opendiloco.data.hub import CONFIG, MODEL_FILES, check_weights, model_values, pretrained_folder
from opendiloco.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer
from opendiloco.errors import MachineError, first_line
from opendiloco.model.loss import check_document_mask
from opendiloco.model.parameters import Shards, layout_of, trainable
from opendiloco.quantities import VALUE_BYTES
from opendiloco.shared_memory import Vector, available_memory, check_available
from opendiloco.stages import at_stage
from peers.errors import DilocoPeerError, ManifestError
from peers.network.signals import signals_held_back
from peers.values.wire import printable

FOLDERS = (
    "Give a hub name, or a folder as ./folder or /folder, with weights as safetensors; on a machine without internet, "
    "a folder."
)
BOTH_WAYS = frozenset({"bert-generation", "xlnet"})
"""Encoders that transformers has no masked language model of."""
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
            refusal = "model.config: transformers refuses it"
            source = cls(values | tokenizer.special, None, refusal, "Correct that value.")
            known = source._known_architecture()
            with source.explained():
                _refuse_unknown_keys(known, values)
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

    def build(self, drawing: TorchDispatchMode) -> Any:
        """Return the model with the weights that are drawn."""
        with self.explained(), drawing:
            if self.folder is None:
                config = AutoConfig.for_model(**self.values)
            else:
                config = AutoConfig.from_pretrained(self.folder, trust_remote_code=False, local_files_only=True)
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)

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
        """Return the architecture's default config, and import its modules. Raises: ManifestError without one, or when
        the model is not causal."""
        model_type = str(self.values.get("model_type"))
        key = "model.config.model_type" if self.folder is None else f"{self.folder / CONFIG}: model_type"
        try:
            known = AutoConfig.for_model(model_type)
        except ValueError:
            raise ManifestError(
                f"{key} = {model_type!r}: transformers knows no such architecture.",
                'Name a causal language model, e.g. "llama".',
            ) from None
        if AutoModelForCausalLM._model_mapping.get(type(known), None) is None or self._sees_later_tokens(known):
            raise ManifestError(
                f"{key} = {model_type!r} is not a causal language model in transformers.",
                'Name a causal language model, e.g. "llama"; or set is_decoder = true where the architecture has it.',
            )
        return known

    def _sees_later_tokens(self, known: Any) -> bool:
        """Return whether it is an encoder, such as BERT, whose config does not make a decoder of it."""
        is_encoder = type(known) in MODEL_FOR_MASKED_LM_MAPPING or known.model_type in BOTH_WAYS
        is_causal = self.values.get("is_decoder") or self.values.get("causal") or self.values.get("attn_type") == "uni"
        return is_encoder and not known.is_encoder_decoder and not is_causal


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
            return source.build(_PortableNormal(config.model.init_seed))

    tried = json.dumps([str(source.folder), source.values])
    if tried not in _rehearsed:
        rehearse(lay_out, "model.path" if config.model.path else "model.config")
        _rehearsed.add(tried)
    model = lay_out()
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
    trained. To draw 10 billion takes two minutes of CPU time, shared out among `threads` (None: see `_draw`).

    Raises: ManifestError when transformers does not know such a model, or it does not fit the windows and tokens, or
    cannot keep documents apart where it should.
    """
    source = _Source.of(config, tokenizer)
    check_available("Building this model", _bytes_to_build(_skeleton_of(source, config, tokenizer)))
    if config.model.path:
        model = source.load(config.model.path)
    else:
        torch.manual_seed(config.model.init_seed)
        model = source.build(_PortableNormal(config.model.init_seed if draws else None, weights, threads))
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
    Shards(layout).store(trainable(model), theta)
    return theta


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
    """Raise ManifestError for a key that transformers keeps and never reads: a misspelt size would be the default.

    Some keys that its configs lack it reads all the same, such as `rope_theta`, whose place has changed.
    """
    model_type = known.model_type
    for key in values.keys() - {"model_type"}:
        if not hasattr(known, key) and key in vars(AutoConfig.for_model(model_type, **{key: values[key]})):
            close = difflib.get_close_matches(key, list(vars(known)), n=1)
            remedy = f"Did you mean {close[0]}?" if close else "Remove it."
            said = printable(f"model.config.{key} = {values[key]!r}")
            raise ManifestError(f"{said}: {model_type} has no such setting.", remedy)


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


# Rehearsal ------------------------------------------------------------------------------------------------------------
# A model's construction is tried out in a process that may take only so much memory and time. What a config costs
# follows from nothing but building it: each architecture makes other things of its numbers.

MOST_BYTES = 1 << 30
"""For modules without values: of the largest models that are known they take a tenth of it."""
MOST_SECONDS = 10
"""Of the processor's time; whatever else runs on the machine makes no difference to it."""
STILLNESS = 10.0
"""Seconds without any of the processor's time, though it does not wait for a core, after which a child hangs."""
ATTEMPTS = 3
"""A child hangs if another thread held a lock at the fork: nothing there lets go of it. The next one need not."""
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl
NEARLY = 1 << 24
"""Bytes below the limit at which whatever goes wrong does so for want of memory: libraries say it in many ways."""


def rehearse(build: Callable[[], object], origin: str) -> None:
    """Call a function in a process of its own, forked so that what is imported here is there, too.

    Raises: ManifestError that begins with the field `origin` for one that fails, or takes more memory than this process
    may or `MOST_BYTES`, or more time than `MOST_SECONDS`; MachineError when all `ATTEMPTS` hang.
    """
    limit = min(MOST_BYTES, available_memory())
    answers = (_attempt(build, origin, limit) for _ in range(ATTEMPTS))
    answer = next((answer for answer in answers if answer is not None), None)
    if answer is None:
        raise MachineError(
            f"{origin}: the process that lays out this model hangs.",
            "Build the model before this program starts threads that use torch.",
        )
    if not answer:
        raise ManifestError(
            f"{origin}: to lay out this model, without any values, takes more than {limit >> 20} MiB of memory or "
            f"{MOST_SECONDS} s.",
            "Lower its counts: of layers, experts or heads; where --max-memory leaves no more, raise that.",
        )
    error = json.loads(answer)
    if error is not None:
        raise ManifestError(*error)


def _attempt(build: Callable[[], object], origin: str, limit: int) -> bytes | None:
    """Return what the child writes: nothing when it hit a limit. None if it hangs."""
    reading, writing = os.pipe()
    with signals_held_back():
        child = os.fork()
        if child == 0:
            _build_and_end(build, origin, limit, writing)
    os.close(writing)
    answer, used = b"", -1.0
    try:
        while True:
            if select.select([reading], [], [], STILLNESS)[0]:
                part = os.read(reading, 65536)
                if not part:
                    return answer
                answer += part
                continue
            process = psutil.Process(child)
            times = process.cpu_times()
            before, used = used, times.user + times.system
            if used == before and process.status() != psutil.STATUS_RUNNING:  # a busy machine lets it wait
                return None
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)  # in case that it is not about to end, or that we are interrupted
        os.waitpid(child, 0)


def _build_and_end(build: Callable[[], object], origin: str, limit: int, writing: int) -> NoReturn:
    """Never return: what is open here is the parent's."""
    try:
        gc.freeze()  # to look through what is the parent's would copy its memory
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        most = _bytes_of("VmSize") + limit
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
        said = None
        try:
            build()
        except Exception as error:
            if isinstance(error, MemoryError) or _bytes_of("VmPeak") > most - NEARLY:
                os._exit(1)
            known = error if isinstance(error, DilocoPeerError) else None
            said = [known.message, known.remedy] if known else [f"{origin}: {first_line(error)}", "Correct it."]
        os.write(writing, json.dumps(said).encode())
    finally:
        os._exit(0)


def _bytes_of(name: str) -> int:
    """Return a figure of this process's memory."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


# Initial weights ------------------------------------------------------------------------------------------------------
# torch's `normal_` is not the same everywhere: its vectorised path, taken on CPUs with AVX2, rounds differently, as do
# the logarithms and cosines of C libraries. Here a value is the sum of 12 uniform draws, less 6 (Irwin-Hall). The draws
# are integers of 16 bits from Philox (Salmon et al., SC 2011), whose stream numpy keeps as it is. Their sums are exact,
# and what follows are elementwise fp32 operations, in which IEEE 754 leaves nothing open. Philox counts: each block of
# values has a counter of its own, so that it does not matter who draws it, or when.

BLOCK = 1 << 20
"""Values that one thread draws at once."""
DRAWS = 12  # of one value: the variance of their sum is 1
HIGHEST = (1 << 16) - 1  # the largest draw of 16 bits
DRAWS_A_WORD = 4
"""Draws in a word of Philox."""
THREADS_AT_MOST = 16
"""Each takes 28 MiB while it draws a block."""


class _PortableNormal(TorchDispatchMode):
    """Makes `normal_` give such values, by a seed and the number of calls before; without a seed, zeros."""

    def __init__(self, seed: int | None, total: int | None = None, threads: int | None = None) -> None:
        """Of `total` values to be drawn, if that is known, it tells how many have been. For `threads` see `_draw`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._total = total
        self._threads = threads
        self._calls = self._drawn = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.normal_.default:
            return func(*args, **(kwargs or {}))
        if self._seed is None:
            return args[0].zero_()
        self._drawn += args[0].numel()
        result = _fill(self._seed, self._calls, *args, threads=self._threads, **(kwargs or {}))
        self._calls += 1
        if self._total:
            at_stage("drawing the initial weights", min(self._drawn / self._total, 1.0))
        return result


def _draw(seed: int, call: int, out: Vector, threads: int | None = None) -> None:
    """Fill a vector with the values of one call, of mean 0 and standard deviation 1. They do not depend on `threads`
    (None: one for each core that we may use, up to a number)."""
    blocks = range(-(-out.size // BLOCK))
    if len(blocks) == 1:  # a small model has many such calls, and to start a thread takes longer than to draw
        _draw_block(seed, call, 0, out)
        return
    with ThreadPoolExecutor(threads or min(usable_cores(), THREADS_AT_MOST)) as pool:
        for done in [pool.submit(_draw_block, seed, call, block, out) for block in blocks]:
            done.result()


def _draw_block(seed: int, call: int, block: int, out: Vector) -> None:
    values = out[block * BLOCK : (block + 1) * BLOCK]
    key, counter = np.array([seed, call], np.uint64), np.array([0, block, 0, 0], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(values.size * DRAWS // DRAWS_A_WORD)
    draws = words.astype("<u8", copy=False).view("<u2").reshape(DRAWS, values.size)
    total = draws[0].astype(np.int32)
    for row in draws[1:]:
        total += row
    total -= DRAWS * HIGHEST // 2
    np.multiply(total, np.float32(1 / (HIGHEST + 1)), out=values, casting="unsafe", dtype=np.float32)


def _fill(
    seed: int,
    call: int,
    tensor: torch.Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    generator: Any = None,
    threads: int | None = None,
) -> torch.Tensor:
    """What `normal_` does; a generator of the caller's is passed over."""
    if tensor.is_meta:
        return tensor
    values = torch.empty(tensor.numel(), dtype=torch.float32)
    _draw(seed, call, values.numpy(), threads)
    return tensor.copy_(values.mul_(std).add_(mean).view(tensor.shape))
