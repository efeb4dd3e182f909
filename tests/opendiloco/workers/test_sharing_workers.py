"""Two workers that share a model, each in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.opendiloco.workers.ranks import Ranks

BEGIN = """
import weakref
from dataclasses import replace
from functools import partial
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.host_memory import MOMENTS_BYTES
from opendiloco.training.inner import ModelReplica
from opendiloco.training.team import Team
from opendiloco.training.trials import keep_compiled_if_it_works
from opendiloco.model.parameters import transformer_blocks
from opendiloco.model.build import build_skeleton, initial_theta
from opendiloco.workers.assembly import assemble_model
from opendiloco.workers.needs import worker_memory
from opendiloco.workers.options import WorkerOptions
from peers.values.leases import SampleRange

team = Team(torch.device("cpu"), rank, 2, mesh)
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
        living = [storage.nbytes() for one in self.storages.values() if (storage := one()) is not None]
        self.bytes = max(self.bytes, sum(living))
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
"""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as ranks:
        yield ranks


def pair(ranks: Ranks, folder: Path, content: dict[str, Any], script: str) -> list[Any]:
    """Return what two workers say that run a script about a run."""
    (folder / "run.json").write_text(json.dumps(content), encoding="utf-8")
    return ranks.run(folder, BEGIN + script)


def content_with(small_content: dict[str, Any], length: int, **model: Any) -> dict[str, Any]:
    config = small_content["model"]["config"] | {"tie_word_embeddings": False} | model
    training = small_content["training"] | {"sequence_length": length, "batch_size": 4}
    return small_content | {"model": {"config": config, "init_seed": 3}, "training": training}


HANGING = """
team.wait_for_all()
team.wait_at_most(0.5)
said = ""
if rank == 0:
    try:
        team.wait_for_all()  # the other does not come
    except RuntimeError as error:
        said = str(error)
    store.set("failed", "yes")
else:
    store.wait(["failed"], timedelta(seconds=100))
end(said)
"""


def test_a_worker_that_hangs_makes_the_others_fail_once_they_train(
    small_content: dict[str, Any], tmp_path: Path, ranks: Ranks
) -> None:
    """Until then they wait for two hours: the first worker may have much to set up."""
    waited, _ = pair(ranks, tmp_path, content_with(small_content, 2), HANGING)
    assert "Timed out waiting 500ms" in waited


SHARING = """
def taken(options):
    memory = worker_memory(build_skeleton(config, ByteTokenizer()), config.training, "cpu", team.shards, options, True)
    model = assemble_model(config, ByteTokenizer(), team, options, None)
    made, peak = ModelReplica(config, model, samples, team, 1, options.reduces_once), Peak()
    add_gradient = made.add_gradient

    def noticed(batch):
        with peak:
            return add_gradient(batch)

    made.add_gradient = noticed
    made.train(theta, 0, (SampleRange(0, 8),), 2)
    moments = MOMENTS_BYTES * memory.trained // 2  # nobody touches them meanwhile
    return peak.bytes + moments, replace(memory, gathering_on_cpu=0).training  # the gaps are no tensors

kept = {}, {"whole_gradients": True}, {"whole_layers": True}
end([taken(WorkerOptions(**options)) for options in kept])
"""


@pytest.mark.thorough
def test_what_sharing_workers_take_is_what_the_formula_says(
    small_content: dict[str, Any], tmp_path: Path, ranks: Ranks
) -> None:
    """Within a tenth, by the sizes of tensors, with what each gathers and keeps whole between windows."""
    sizes = {"vocab_size": 2000, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}
    found = zip(*pair(ranks, tmp_path, content_with(small_content, 2, **sizes), SHARING), strict=True)
    formulas = list[int]()
    for (first, formula), (second, _) in found:
        assert first + second == pytest.approx(formula, rel=0.1)
        formulas.append(formula)
    plain, whole_gradients, whole_layers = formulas
    assert 1.15 * plain < whole_gradients < whole_layers / 1.1


FUSED = """
import numpy as np
from opendiloco.training import inner, optimizers
from opendiloco.config.overrides import NO_OVERRIDES

optimizers.FUSED_ON = {"cpu"}

def stumbling(module, inputs, output):
    calls.append(rank)
    if rank == 1 and len(calls) == 2:
        output.logits = output.logits * float("nan")

found = []
for steps_without_waiting in (inner.steps_without_waiting, lambda optimizer: False):
    inner.steps_without_waiting, calls = steps_without_waiting, []
    model = assemble_model(config, ByteTokenizer(), team, WorkerOptions(), None)
    model.register_forward_hook(stumbling)
    made, local = ModelReplica(config, model, samples, team), np.zeros_like(theta)
    trained = made.train(theta, 0, (SampleRange(0, 16),), 4)
    made.store(local)
    steps = {float(values["step"]) for values in made._optimizer.state.values()}
    moments = [float(values["exp_avg"].to_local().double().sum()) for values in made._optimizer.state.values()]
    found.append([trained.skipped, sorted(steps), trained.loss, trained.gradient_norm, local.tolist(), moments])
end(found)
"""


def test_sharing_workers_leave_out_the_same_fused_step(
    small_content: dict[str, Any], tmp_path: Path, ranks: Ranks
) -> None:
    """The loss of one of them is no number, which each learns from numbers on its own device."""
    first, second = pair(ranks, tmp_path, content_with(small_content, 16), FUSED)
    for unwaiting, waiting in (first, second):
        assert unwaiting == waiting
        assert unwaiting[:2] == [1, [3.0]]
    assert first[0][2:4] == second[0][2:4]


BY_PIECES = """
from opendiloco.model import loss as losses
found = []
for logits in (1 << 24, 7 * config.model.config["vocab_size"]):
    losses.LOGITS_AT_ONCE["cpu"] = logits
    model = assemble_model(config, ByteTokenizer(), team, WorkerOptions(), None)
    made = ModelReplica(config, model, samples, team, micro_batch=1)
    found.append([made.train(theta, index, (SampleRange(0, 8),), 2).loss for index in range(2)])
end(found)
"""


def test_sharing_workers_find_the_same_loss_without_whole_logits(
    small_content: dict[str, Any], tmp_path: Path, ranks: Ranks
) -> None:
    """Each has half of the head, and gathers the other half for it."""
    for whole, by_pieces in pair(ranks, tmp_path, content_with(small_content, 16), BY_PIECES):
        assert by_pieces == pytest.approx(whole, abs=1e-6)


CHECKPOINTING = """
torch.compile = partial(torch.compile, backend="aot_eager")  # that needs no C compiler
end([peak_of(WorkerOptions(compile=True, activation_checkpointing=wanted)) for wanted in (False, True)])
"""


@pytest.mark.thorough
def test_activation_checkpointing_saves_memory_where_blocks_are_sharded_and_compiled(
    small_content: dict[str, Any], tmp_path: Path, ranks: Ranks
) -> None:
    content = content_with(small_content, 256, num_hidden_layers=6, max_position_embeddings=256, vocab_size=259)
    for plain, checkpointed in pair(ranks, tmp_path, content, CHECKPOINTING):
        assert checkpointed < 0.6 * plain, (plain, checkpointed)


TRIALS = """
from transformers.models.llama import modeling_llama
from opendiloco.training import trials
from opendiloco.stages import watched_by
from tests.opendiloco.training.test_sharding import Broken

make_mask, said = modeling_llama.create_causal_mask, []

def refuse(*arguments, **options):
    raise RuntimeError("there is no compiler here")

def mask(config, *arguments, **options):
    is_refused = rank == 1 and config._attn_implementation == "eager"
    return refuse() if is_refused else make_mask(config, *arguments, **options)

def trained(compiled, trial):
    torch.compile = compiled
    model = assemble_model(config, ByteTokenizer(), team, WorkerOptions(compile=compiled is not None), None)
    replica = ModelReplica(config, model, samples, team, micro_batch=2)
    replica.load(theta)
    with watched_by(lambda stage, share: said.append(stage)):
        trial(replica)
    assert all("forward" not in vars(block) for block in transformer_blocks(model))
    done = replica.train(theta, 0, (SampleRange(0, 8),), 2)
    return done.loss

def compiling(replica):
    keep_compiled_if_it_works(replica, team)

def attending(replica):
    assert trials.document_attention(replica, team, ByteTokenizer.end) is None

def broken(forward):
    return Broken(forward) if rank == 1 else forward

def refused(forward):
    return refuse if rank == 1 else forward

expected = trained(None, lambda replica: None)
assert trained(broken, compiling) == expected
assert trained(refused, compiling) == expected
trials.FLEX, trials.FLEX_ON, trials.compiling_lacks = "eager", {"cpu"}, lambda device: None
modeling_llama.create_causal_mask = mask
assert trained(None, attending) == expected
end([stage for stage in said if stage.startswith(("not compiling", "attention"))])
"""


@pytest.mark.thorough
def test_what_fails_on_one_worker_alone_is_left_out_on_all(
    small_content: dict[str, Any], tmp_path: Path, ranks: Ranks
) -> None:
    """Compiling, forward and back, and the mask of another attention; and both train as if nobody had tried. No trial
    keeps another worker waiting."""
    model = {"config": small_content["model"]["config"] | {"num_hidden_layers": 2}, "init_seed": 3}
    training = small_content["training"] | {"document_mask": True}
    said = pair(ranks, tmp_path, small_content | {"model": model, "training": training}, TRIALS)
    uncompiled = "not compiling, which would be faster: "
    masked = "attention across documents is computed and masked, which is slower: "
    assert said[0] == [f"{uncompiled}another worker cannot compile."] * 2 + [
        f"{masked}flex attention fails on another worker."
    ]
    assert said[1] == [
        f"{uncompiled}fatal error: Python.h: No such file.",
        f"{uncompiled}there is no compiler here.",
        f"{masked}there is no compiler here.",
    ]


OPTIMIZERS = """
from torch.distributed.fsdp import fully_shard
from opendiloco.errors import MachineError
from opendiloco.training.optimizers import build_inner_optimizer
from opendiloco.config.optimizers import AdafactorSection, AdamWSettings, MuonSection, TorchSection

torch.Tensor.bfloat16 = lambda tensor: tensor * 1  # so that the order of sums does not matter

def built():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 7))

whole, sharded = built(), built()
fully_shard(sharded, mesh=mesh)
section = MuonSection(learning_rate=0.1, adamw=AdamWSettings(learning_rate=0.01))
pairs = [(model, build_inner_optimizer(model, section)) for model in (whole, sharded)]
for _ in range(3):
    inputs = torch.randn(8, 6)
    for model, optimizer in pairs:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
refused = []
for section in (AdafactorSection(learning_rate=0.1), TorchSection(name="Rprop", learning_rate=0.1)):
    try:
        build_inner_optimizer(sharded, section)
    except MachineError as error:
        refused.append(str(error))
parameters = zip(whole.parameters(), sharded.parameters())
end([max((one - other.full_tensor()).abs().max().item() for one, other in parameters), refused])
"""


@pytest.mark.thorough
def test_muon_orthogonalizes_whole_matrices_also_of_sharded_models(tmp_path: Path, ranks: Ranks) -> None:
    """And what torch cannot compute on shards is refused."""
    for difference, refused in ranks.run(tmp_path, OPTIMIZERS):
        assert difference < 1e-5
        assert len(refused) == 2
        assert all("cannot compute" in error and "one worker" in error for error in refused)
