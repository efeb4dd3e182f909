"""The construction of a run's transformers model, and the model's initial weights as a flat fp32 vector.

Every peer draws the initial weights itself, so they must have the same bits on every machine: hence `_PortableNormal`.
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
"""Encoders that are missing in transformers' list of masked language models."""
_rehearsed: set[str] = set()
"""Models that this process has already built in a rehearsal (see `rehearse`), as JSON of folder and config."""


@dataclass(frozen=True)
class _Source:
    """A model's config values, and the folder of its pretrained weights, None if the run draws random weights.
    `refusal` and `remedy` are the beginning and the end of error messages."""

    values: dict[str, Any]
    folder: Path | None
    refusal: str
    remedy: str

    @classmethod
    def of(cls, config: RunConfig, tokenizer: Tokenizer) -> _Source:
        """Return the config values and the weights' folder of a run's model. For a hub name, only the config.json is
        downloaded. Raises: ManifestError if the config cannot be loaded, or the architecture is unknown."""
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
        """Convert each exception raised within the context, except MemoryError and DilocoPeerError, into a
        ManifestError."""
        try:
            yield
        except (MemoryError, DilocoPeerError):
            raise
        except Exception as error:
            raise ManifestError(f"{self.refusal}: {first_line(error)}", self.remedy) from error

    def build(self, drawing: TorchDispatchMode) -> Any:
        """Build the model in the dispatch mode `drawing`, which draws the weights, and return the model."""
        with self.explained(), drawing:
            if self.folder is None:
                config = AutoConfig.for_model(**self.values)
            else:
                config = AutoConfig.from_pretrained(self.folder, trust_remote_code=False, local_files_only=True)
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)

    def load(self, path: str) -> Any:
        """Return the model with the pretrained weights at `path`, a folder or a hub name to download."""
        with self.explained():
            folder = pretrained_folder(path, *MODEL_FILES)
            check_weights(folder)
            return AutoModelForCausalLM.from_pretrained(
                folder,
                use_safetensors=True,  # other formats are pickles, which can run code
                trust_remote_code=False,
                local_files_only=True,
            )

    def _known_architecture(self) -> Any:
        """Return the default config of the model's architecture. Raises: ManifestError if transformers does not know
        the architecture, or it is not causal."""
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
        """Return True if the architecture is an encoder, in which tokens attend to later tokens, such as BERT, and the
        config does not make it a decoder."""
        is_encoder = type(known) in MODEL_FOR_MASKED_LM_MAPPING or known.model_type in BOTH_WAYS
        is_causal = self.values.get("is_decoder") or self.values.get("causal") or self.values.get("attn_type") == "uni"
        return is_encoder and not known.is_encoder_decoder and not is_causal


def build_skeleton(config: RunConfig, tokenizer: Tokenizer) -> Any:
    """Return the run's model on torch's meta device, where weights have shapes but no values, and so no memory. Raises:
    ManifestError as `build_model` does, or if building even this model exceeds the limits on memory or time."""
    return _skeleton_of(_Source.of(config, tokenizer), config, tokenizer)


def _skeleton_of(source: _Source, config: RunConfig, tokenizer: Tokenizer) -> Any:
    """Return the model of a source on the meta device. Because a config may name any number of layers, a child process
    with limits on memory and time builds the model first."""

    def lay_out() -> Any:
        with torch.device("meta"):
            return source.build(_PortableNormal(config.model.init_seed))

    key = json.dumps([str(source.folder), source.values])
    if key not in _rehearsed:
        rehearse(lay_out, "model.path" if config.model.path else "model.config")
        _rehearsed.add(key)
    model = lay_out()
    _check_fit(model, config, tokenizer)
    return model.float()


def sized_skeleton(config: RunConfig) -> Any:
    """Return the run's model on the meta device, to compute its size, without downloading the tokenizer. Raises: see
    `build_skeleton`; DataError if the run's tokenizer is a file that is missing."""
    tokenizer: Tokenizer = ByteTokenizer()  # a stand-in: the model's size does not depend on it
    if config.tokenizer.kind == "file":
        tokenizer = build_tokenizer(config.tokenizer)  # a ByteTokenizer may have too many tokens for the model
    return build_skeleton(config, tokenizer)


def build_model(
    config: RunConfig, tokenizer: Tokenizer, weights: int | None = None, draws: bool = True, threads: int | None = None
) -> Any:
    """Return the run's causal language model in fp32 on the CPU, with its initial weights. If `weights`, the number of
    values to draw, is given, progress is reported.

    Without `draws`, drawn values are zeros, for callers that load theta into a model all of whose parameters are
    trained. Drawing 10 billion values takes two minutes of CPU time, divided among `threads` (None: see `_draw`).

    Raises: ManifestError if transformers does not know the model, if it does not fit the windows or the tokens, or if
    it cannot keep documents apart for a document mask.
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
    """Return the bytes of memory needed to build a model: its parameters, its buffers (in some architectures
    also a mask over all pairs of positions), and two copies of the largest buffer, which constructors make."""
    buffers = [each.nbytes for each in skeleton.buffers()]
    parameters = VALUE_BYTES * sum(each.numel() for each in skeleton.parameters())
    return int(parameters + sum(buffers) + 2 * max(buffers, default=0))


def initial_theta(config: RunConfig) -> Vector:
    """Return the run's initial weights as a flat vector, with the same bits on every peer. Raises: see `build_model`;
    DataError if the tokenizer cannot be loaded."""
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
            f"the model's {fragments} fragments are more than training.inner_steps = {steps}, but each needs an inner "
            "step of its own.",
            "Raise streaming.layers_per_fragment or training.inner_steps.",
        )


def _refuse_unknown_keys(known: Any, values: dict[str, Any]) -> None:
    """Raise ManifestError for a key of the manifest's model.config that transformers would store but never read, such
    as a misspelt size. Keys that transformers reads pass, even if the default config does not have them, such as
    `rope_theta`."""
    model_type = known.model_type
    for key in values.keys() - {"model_type"}:
        if not hasattr(known, key) and key in vars(AutoConfig.for_model(model_type, **{key: values[key]})):
            close = difflib.get_close_matches(key, list(vars(known)), n=1)
            remedy = f"Did you mean {close[0]}?" if close else "Remove it."
            setting = printable(f"model.config.{key} = {values[key]!r}")
            raise ManifestError(f"{setting}: {model_type} has no such setting.", remedy)


def with_sizes_named(config: RunConfig) -> RunConfig:
    """Return the run's configuration, with the sizes of its fragments added if the model has several. Raises:
    ManifestError if the configuration has other sizes, or the model has no blocks; see also `sized_skeleton`."""
    if config.streaming.layers_per_fragment is None:
        return config
    layout = layout_of(sized_skeleton(config), config.streaming)
    sizes = tuple(part.stop - part.start for part in layout.fragments)
    content = config.to_manifest_content()
    return RunConfig.from_manifest_content(content | {"streaming": content["streaming"] | {"sizes": list(sizes)}})


# Rehearsal: building in a limited process -----------------------------------------------------------------------------
# A model is first built without values, in a process with limits on memory and time. Only building it shows the memory
# and time that a config costs, because each architecture uses the config's numbers differently.

MOST_BYTES = 1 << 30
"""Most bytes of memory for a model without values. The largest known models need a tenth of that."""
MOST_SECONDS = 10
"""Most seconds of processor time for a rehearsal. Processor time does not depend on the machine's other load."""
STILLNESS = 10.0
"""Seconds without processor time, and without waiting for a core, after which a child counts as hanging."""
ATTEMPTS = 3
"""Most forks for a rehearsal. A forked process hangs if another thread held a lock at the fork."""
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl: the signal that a child gets when its parent dies
NEARLY = 1 << 24
"""An error counts as too little memory if fewer bytes than this were left: libraries raise many types for that."""


def rehearse(build: Callable[[], object], origin: str) -> None:
    """Call `build` in a process with limits on memory and time. The process is a fork of this one, so that it need not
    import any modules again.

    Raises: ManifestError that begins with the field `origin` if the function fails, needs more memory than this process
    may use or than `MOST_BYTES`, or more time than `MOST_SECONDS`; MachineError if all `ATTEMPTS` hang.
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
            "Lower its numbers of layers, experts or heads, or raise --max-memory.",
        )
    error = json.loads(answer)
    if error is not None:
        raise ManifestError(*error)


def _attempt(build: Callable[[], object], origin: str, limit: int) -> bytes | None:
    """Call `build` in a forked process that may use `limit` more bytes of memory and MOST_SECONDS of CPU time. Return
    the error as JSON (null for none), no bytes if the process needed more, or None if it hangs."""
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
            if used == before and process.status() != psutil.STATUS_RUNNING:  # RUNNING: computes, or waits for a core
                return None
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)  # the child may hang, or an exception may have interrupted this function
        os.waitpid(child, 0)


def _build_and_end(build: Callable[[], object], origin: str, limit: int, writing: int) -> NoReturn:
    """Call `build` in the forked child, write the error as JSON (null for none) to the descriptor `writing`, and exit
    without cleaning up, because open files belong to the parent."""
    try:
        gc.freeze()  # the garbage collector would write to shared memory pages, and so copy them
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        most = _bytes_of("VmSize") + limit
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
        report = None
        try:
            build()
        except Exception as error:
            if isinstance(error, MemoryError) or _bytes_of("VmPeak") > most - NEARLY:
                os._exit(1)
            known = error if isinstance(error, DilocoPeerError) else None
            report = [known.message, known.remedy] if known else [f"{origin}: {first_line(error)}", "Correct it."]
        os.write(writing, json.dumps(report).encode())
    finally:
        os._exit(0)


def _bytes_of(name: str) -> int:
    """Return, in bytes, the memory figure of this process that /proc/self/status has under `name`, such as VmPeak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


# Initial weights ------------------------------------------------------------------------------------------------------
# torch's `normal_` differs between machines: its vectorised path for CPUs with AVX2 rounds differently, and so do the
# logarithms and cosines of C libraries. Here a value is the sum of 12 uniform draws, minus 6 (Irwin-Hall). The draws
# are 16-bit integers from Philox (Salmon et al., SC 2011), whose stream is stable across numpy versions. Their sums are
# exact, and the elementwise fp32 operations that follow are fully determined by IEEE 754. Philox is counter-based: each
# block of values has its own counter, so any thread may draw it at any time.

BLOCK = 1 << 20
"""Values that a thread draws at once."""
DRAWS = 12  # uniform draws summed for each value, so that the variance of the sum is 1
HIGHEST = (1 << 16) - 1  # largest uniform draw, of 16 bits
DRAWS_A_WORD = 4
"""Draws in a 64-bit word of Philox."""
THREADS_AT_MOST = 16
"""Most threads that draw weights. Each thread needs 28 MiB to draw a block."""


class _PortableNormal(TorchDispatchMode):
    """A torch dispatch mode in which `normal_` draws values that depend only on the seed and the number of earlier
    calls; without a seed, `normal_` writes zeros."""

    def __init__(self, seed: int | None, total: int | None = None, threads: int | None = None) -> None:
        """Create the torch mode that replaces `normal_`. If `total`, the number of values to draw, is given,
        progress is reported. `threads` threads draw; None: one for each usable core, at most THREADS_AT_MOST."""
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
    """Fill `out` with normal values that depend only on `seed` and on `call`, the number of earlier calls of `normal_`.
    Their mean is 0, and their standard deviation 1. `threads` None: the usable cores, up to THREADS_AT_MOST."""
    blocks = range(-(-out.size // BLOCK))
    if len(blocks) == 1:  # for so few values, starting threads takes longer than drawing
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
    """Fill a tensor with normal values that depend only on `seed` and on `call`, the number of earlier calls of torch's
    `normal_`, which this function replaces. `generator` is ignored."""
    if tensor.is_meta:
        return tensor
    values = torch.empty(tensor.numel(), dtype=torch.float32)
    _draw(seed, call, values.numpy(), threads)
    return tensor.copy_(values.mul_(std).add_(mean).view(tensor.shape))
