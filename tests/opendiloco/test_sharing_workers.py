"""Two workers that share a model, in processes of their own: what they take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 300.0
"""Seconds: each worker starts torch and transformers, on a busy machine."""

BEGIN = """
import json, os, sys, weakref, torch, torch.distributed as distributed
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.host_memory import MOMENTS_BYTES
from opendiloco.inner.replica import ModelReplica
from opendiloco.inner.team import Team
from opendiloco.inner.trials import keep_compiled_if_it_works
from opendiloco.model.blocks import transformer_blocks
from opendiloco.model.build import build_skeleton, initial_theta
from opendiloco.workers.assembly import assemble_model, memory_of
from opendiloco.workers.options import WorkerOptions
from peers.values.leases import SampleRange

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
store = distributed.FileStore(str(folder / "store"), 2)
distributed.init_process_group("gloo", timeout=timedelta(seconds=120), rank=rank, world_size=2, store=store)
team = Team(torch.device("cpu"), rank, 2, distributed.init_device_mesh("cpu", (2,)))
config = RunConfig.from_manifest_content(json.loads((folder / "run.json").read_text()))
samples, theta = load_data(config, ByteTokenizer()).samples, initial_theta(config)

class Peak(TorchDispatchMode):
    # What tensors take at most. FSDP2 gives storages their memory, and takes it, while they live.
    def __init__(self):
        super().__init__()
        self.bytes, self.storages = 0, {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs, result)):
            if isinstance(one, torch.Tensor) and one.device.type == "cpu":
                storage = one.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        living = [reference() for reference in self.storages.values()]
        self.bytes = max(self.bytes, sum(storage.nbytes() for storage in living if storage is not None))
        return result

def peak_of(options):
    torch.compiler.reset()
    with Peak() as peak:
        model = assemble_model(config, ByteTokenizer(), team, options, None)
        peak.bytes, peak.storages = 0, {}  # only of what training uses
        made = ModelReplica(config, model, samples, team, micro_batch=1)
        made.load(theta)
        if options.compile:
            keep_compiled_if_it_works(made, team)
            peak.bytes = 0
        made.train(theta, 0, (SampleRange(0, 8),), 2)
    return peak.bytes

def end(said):
    print(json.dumps(said), flush=True)
    os._exit(0)  # as workers end: an interpreter that ends while gloo's threads live may abort
"""


def pair(folder: Path, content: dict[str, Any], script: str) -> list[Any]:
    """Return what two workers say that run a script."""
    (folder / "run.json").write_text(json.dumps(content), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN + script, str(rank), str(folder)],
            env=environment | {"GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        ended = [worker.communicate(timeout=PATIENCE) for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], "\n".join(error.decode() for _, error in ended)
        return [json.loads(out) for out, _ in ended]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def content_with(small_content: dict[str, Any], length: int, **model: Any) -> dict[str, Any]:
    config = small_content["model"]["config"] | {"tie_word_embeddings": False} | model
    training = small_content["training"] | {"sequence_length": length, "batch_size": 4}
    return small_content | {"model": {"config": config, "init_seed": 3}, "training": training}


SHARING = """
def taken(options):
    memory = memory_of(build_skeleton(config, ByteTokenizer()), team, config.training, options)
    model = assemble_model(config, ByteTokenizer(), team, options, None)
    made, peak = ModelReplica(config, model, samples, team, 1, options.reduces_once), Peak()
    add_gradient = made._add_gradient

    def noticed(batch):
        with peak:
            return add_gradient(batch)

    made._add_gradient = noticed
    made.train(theta, 0, (SampleRange(0, 8),), 2)
    moments = MOMENTS_BYTES * memory.trained // 2  # nobody touches them meanwhile
    return peak.bytes + moments, replace(memory, gathering_on_cpu=0).training  # the gaps are no tensors

kept = {}, {"whole_gradients": True}, {"whole_layers": True}
end([taken(WorkerOptions(**options)) for options in kept])
"""


def test_what_sharing_workers_take_is_what_the_formula_says(small_content: dict[str, Any], tmp_path: Path) -> None:
    """Within a tenth, by the sizes of tensors, with what each gathers and keeps whole between windows."""
    sizes = {"vocab_size": 2000, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}
    found = zip(*pair(tmp_path, content_with(small_content, 2, **sizes), SHARING), strict=True)
    formulas = list[int]()
    for (first, formula), (second, _) in found:
        assert first + second == pytest.approx(formula, rel=0.1)
        formulas.append(formula)
    plain, whole_gradients, whole_layers = formulas
    assert 1.15 * plain < whole_gradients < whole_layers / 1.1


BY_PIECES = """
from opendiloco.model import head
losses = []
for logits in (1 << 24, 7 * config.model.config["vocab_size"]):
    head.LOGITS_AT_ONCE["cpu"] = logits
    model = assemble_model(config, ByteTokenizer(), team, WorkerOptions(), None)
    made = ModelReplica(config, model, samples, team, micro_batch=1)
    losses.append([made.train(theta, index, (SampleRange(0, 8),), 2).loss for index in range(2)])
end(losses)
"""


def test_sharing_workers_find_the_same_loss_without_whole_logits(small_content: dict[str, Any], tmp_path: Path) -> None:
    """Each has half of the head, and gathers the other half for it."""
    for whole, by_pieces in pair(tmp_path, content_with(small_content, 16), BY_PIECES):
        assert by_pieces == pytest.approx(whole, abs=1e-6)


CHECKPOINTING = """
torch.compile = partial(torch.compile, backend="aot_eager")  # that needs no C compiler
end([peak_of(WorkerOptions(compile=True, activation_checkpointing=wanted)) for wanted in (False, True)])
"""


def test_activation_checkpointing_saves_memory_where_blocks_are_sharded_and_compiled(
    small_content: dict[str, Any], tmp_path: Path
) -> None:
    content = content_with(small_content, 256, num_hidden_layers=6, max_position_embeddings=256, vocab_size=259)
    for plain, checkpointed in pair(tmp_path, content, CHECKPOINTING):
        assert checkpointed < 0.6 * plain, (plain, checkpointed)
