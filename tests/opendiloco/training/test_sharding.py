"""The sharded model in this process: as each of several workers has it, and as one worker computes with it."""

from __future__ import annotations

import math
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.errors import MachineError
from opendiloco.model import build
from opendiloco.model.build import build_model, build_skeleton, initial_theta
from opendiloco.model.parameters import Shards, layout_of, local_part, shard_rows, trainable, transformer_blocks
from opendiloco.shared_memory import SharedVectors, create_memory_file
from opendiloco.stages import watched_by
from opendiloco.training.inner import ModelReplica
from opendiloco.training.team import Team, fill_untrained, has_other_tensors, shard_model
from opendiloco.training.trials import compile_blocks, keep_compiled_if_it_works, trying
from opendiloco.workers import assembly
from opendiloco.workers.assembly import assemble_model
from opendiloco.workers.options import WorkerOptions
from peers.values.leases import SampleRange
from tests.opendiloco.training.all_shards import only_one

CPU = torch.device("cpu")
LEASE = (SampleRange(0, 8),)
EXPERTS = {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4, "router_aux_loss_coef": 0.1}
MODELS: dict[str, dict[str, Any]] = {"llama": {}, "mixtral": EXPERTS}


def with_model(content: dict[str, Any], *changes: dict[str, Any], **more: Any) -> RunConfig:
    """The small run with another model."""
    model = content["model"]["config"] | {key: value for change in (*changes, more) for key, value in change.items()}
    return RunConfig.from_manifest_content(content | {"model": {"config": model, "init_seed": 3}})


def one_of_three(rank: int) -> Team:
    """A worker whose fellows are not there: nothing can be computed, but everything is cut as if they were."""
    dist.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
    return Team(CPU, rank, 3, init_device_mesh("cpu", (3,)))


@pytest.mark.usefixtures("_process_group_ends")
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_worker_has_its_rows_of_every_parameter(small_config: RunConfig, rank: int) -> None:
    team, model = one_of_three(rank), build_skeleton(small_config, ByteTokenizer())
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    shard_model(model, team, small_config.training)
    assert layout_of(model).size == initial_theta(small_config).size
    for name, parameter in model.named_parameters():
        rows = shard_rows(shapes[name][0], rank, 3)
        assert local_part(parameter).shape == (rows.stop - rows.start, *shapes[name][1:])
        assert not local_part(parameter).is_meta
    assert model.lm_head.weight is model.model.embed_tokens.weight
    theta = initial_theta(small_config)
    shards, back = Shards(layout_of(model), rank, 3), np.full_like(theta, np.nan)
    shards.load(theta, trainable(model))
    shards.store(trainable(model), back)
    own = ~np.isnan(back)
    assert 0.2 < own.mean() < 0.4
    assert np.array_equal(back[own], theta[own])


@pytest.mark.usefixtures("_process_group_ends")
def test_what_is_not_trained_comes_from_the_first_worker(small_config: RunConfig) -> None:
    skeleton, whole = build_skeleton(small_config, ByteTokenizer()), build_model(small_config, ByteTokenizer())
    for model in (skeleton, whole):
        model.model.norm.weight.requires_grad_(False)
    with torch.no_grad():
        whole.model.norm.weight.copy_(torch.arange(16.0))

    class Told(Team):
        def take_from_first(self, tensor: torch.Tensor) -> None:
            tensor.copy_(next(told))

    told = iter([whole.model.norm.weight, *whole.buffers()])
    team = one_of_three(2)
    shard_model(skeleton, team, small_config.training)
    fill_untrained(skeleton, None, Told(CPU, 2, 3, team.mesh))
    assert local_part(skeleton.model.norm.weight).tolist() == [12, 13, 14, 15]
    assert torch.equal(skeleton.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)
    assert "model.norm.weight" not in [place.name for place in layout_of(skeleton)]


def replica_of(
    config: RunConfig, team: Team, options: WorkerOptions | None = None, micro_batch: int | None = None
) -> ModelReplica:
    options = options or WorkerOptions()
    model = assemble_model(config, ByteTokenizer(), team, options, None)
    samples = load_data(config, ByteTokenizer()).samples
    return ModelReplica(config, model, samples, team, micro_batch, reduces_once=options.reduces_once)


def trained(
    config: RunConfig, team: Team, options: WorkerOptions | None = None, micro_batch: int | None = None
) -> tuple[float, Any]:
    replica = replica_of(config, team, options, micro_batch)
    theta = initial_theta(config)
    loss = replica.train(theta, 0, LEASE, 4).loss
    local = np.empty_like(theta)
    replica.store(local)
    return loss, local


@pytest.mark.usefixtures("_process_group_ends")
def test_a_worker_with_all_shards_computes_as_one_without(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, local = trained(small_config, Team(CPU))
    team = only_one()
    assert trained(small_config, team)[0] == pytest.approx(loss, abs=1e-6)
    assert np.abs(trained(small_config, team)[1] - local).max() < 1e-6
    checkpointed = WorkerOptions(activation_checkpointing=True)
    assert trained(small_config, team, checkpointed)[0] == pytest.approx(loss, abs=1e-6)
    wanted, set_sync = list[bool](), FSDPModule.set_requires_gradient_sync

    def note(model: FSDPModule, is_wanted: bool) -> None:
        wanted.append(is_wanted)
        set_sync(model, is_wanted)

    monkeypatch.setattr(FSDPModule, "set_requires_gradient_sync", note)
    for options in (WorkerOptions(), WorkerOptions(whole_gradients=True), WorkerOptions(whole_layers=True)):
        wanted.clear()
        assert trained(small_config, team, options, micro_batch=1)[0] == pytest.approx(loss, abs=1e-6)
        assert wanted == [False, True] * 4 * options.reduces_once  # two windows in each of four inner steps
    replica = replica_of(small_config, team, WorkerOptions(whole_layers=True))
    with torch.no_grad():  # what a forward pass alone has gathered must not stay
        replica.loss(torch.zeros(2, replica.window_length, dtype=torch.long))
    assert replica.train(initial_theta(small_config), 0, LEASE, 4).loss == pytest.approx(loss, abs=1e-6)
    monkeypatch.setattr(assembly, "has_other_tensors", lambda model: True)  # each worker then builds a whole model
    assert trained(small_config, team)[0] == pytest.approx(loss, abs=1e-6)


@pytest.mark.usefixtures("_process_group_ends")
@pytest.mark.parametrize("whole_layers", [False, True])
def test_whole_layers_stay_gathered_until_the_backward_pass(small_config: RunConfig, whole_layers: bool) -> None:
    team = only_one()
    replica = replica_of(small_config, team, WorkerOptions(whole_layers=whole_layers))
    replica.load(initial_theta(small_config))
    [block] = transformer_blocks(replica.model)
    loss = replica.loss(torch.zeros(2, replica.window_length, dtype=torch.long))
    assert [isinstance(one, DTensor) for one in block.parameters()] == [not whole_layers] * len([*block.parameters()])
    loss.backward()
    assert all(isinstance(one, DTensor) for one in block.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_worker_that_is_alone_has_the_plain_model_on_its_device(
    small_content: dict[str, Any], precision: str
) -> None:
    """As one GPU has it, played by a device that computes nothing; so it can train with every optimizer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        team = Team.meet(torch.device("meta"), 0, 1, listener=os.dup(listener.fileno()))
    assert team.mesh is None
    assert not dist.is_initialized()
    adafactor = {"kind": "adafactor", "learning_rate": 0.01}
    training = small_content["training"] | {"precision": precision}
    config = RunConfig.from_manifest_content(small_content | {"inner_optimizer": adafactor, "training": training})
    model = assemble_model(config, ByteTokenizer(), team, WorkerOptions(compile=True), None)
    assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    replica = ModelReplica(config, model, load_data(config, ByteTokenizer()).samples, team)
    assert replica.layout.size == initial_theta(config).size
    loss, local = trained(config, Team.meet(CPU, 0, 1))
    assert math.isfinite(loss)
    assert np.abs(local - initial_theta(config)).max() > 1e-3


@pytest.mark.thorough
@pytest.mark.usefixtures("_process_group_ends")
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_activations_are_computed_again_whatever_else_is_chosen(
    small_content: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharded or not, compiled or not, with a loss of the router or not: and what is trained is the same."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # that needs no C compiler
    config = with_model(small_content, MODELS[kind], num_hidden_layers=2)
    alone = trained(config, Team(CPU))[0]
    for team, compiled, checkpointed in product((Team(CPU), only_one()), (False, True), (False, True)):
        options = WorkerOptions(compile=compiled, activation_checkpointing=checkpointed)
        model = assemble_model(config, ByteTokenizer(), team, options, None)
        assert len(transformer_blocks(model)) == 2
        assert [hasattr(block.forward, "_torchdynamo_orig_callable") for block in transformer_blocks(model)] == [
            compiled
        ] * 2
        forwards = list[int]()
        for number, block in enumerate(transformer_blocks(model)):
            note = partial(forwards.append, number)
            block.self_attn.register_forward_pre_hook(lambda *_, note=note: note())
        replica = ModelReplica(config, model, load_data(config, ByteTokenizer()).samples, team)
        with trying(replica, team):
            pass  # one window has gone forward and back
        assert sorted(forwards) == ([0, 0, 1, 1] if checkpointed else [0, 1])
        if checkpointed or not compiled:
            assert trained(config, team, options)[0] == pytest.approx(alone, abs=1e-6)


@pytest.mark.usefixtures("_process_group_ends")
def test_to_try_a_window_changes_nothing(small_config: RunConfig) -> None:
    for team in (Team(CPU), only_one()):
        model = assemble_model(small_config, ByteTokenizer(), team, WorkerOptions(), None)
        replica = ModelReplica(small_config, model, load_data(small_config, ByteTokenizer()).samples, team)
        replica.load(initial_theta(small_config))
        with trying(replica, team) as taken:
            assert taken(2) > taken(1)
        assert replica.train(initial_theta(small_config), 0, LEASE, 4).loss == trained(small_config, team)[0]


@pytest.mark.parametrize("frozen", [False, True])
def test_workers_that_start_again_draw_no_weights_that_theta_has(
    small_config: RunConfig, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that is frozen is in no theta, so that it has to be drawn again."""
    drawn, fill = list[int](), build._fill

    def note(seed: int, call: int, tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        drawn.extend([tensor.numel()] * (tensor.device == CPU))
        return fill(seed, call, tensor, *arguments, **options)

    monkeypatch.setattr(build, "_fill", note)
    if frozen:
        monkeypatch.setattr(assembly, "is_all_trained", lambda model: False)
    first, again = create_memory_file(), assemble_model(small_config, ByteTokenizer(), Team(CPU), WorkerOptions(), None)
    assert bool(drawn) == frozen
    model = assemble_model(small_config, ByteTokenizer(), Team(CPU), WorkerOptions(), first)
    assert drawn
    theta = SharedVectors(first, layout_of(model).size).theta
    os.close(first)
    Shards(layout_of(again)).load(theta, trainable(again))
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())


@pytest.mark.parametrize("threads", [1, 3, None])
def test_initial_weights_are_drawn_by_as_many_threads_as_the_owner_allows(
    small_config: RunConfig, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all cores where nothing is said: the other workers wait meanwhile."""
    pools = list[int]()

    class Noting(ThreadPoolExecutor):
        def __init__(self, size: int) -> None:
            pools.append(size)
            super().__init__(size)

    monkeypatch.setattr(build, "ThreadPoolExecutor", Noting)
    monkeypatch.setattr(build, "usable_cores", lambda: 7)
    monkeypatch.setattr(build, "BLOCK", 64)  # of this small model most are larger
    memory = create_memory_file()
    assemble_model(small_config, ByteTokenizer(), Team(CPU), WorkerOptions(threads=threads), memory)
    os.close(memory)
    assert set(pools) == {threads or 7}


class Failing(torch.autograd.Function):
    """The identity, of which no gradient can be had."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values * 1

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError("fatal error: Python.h: No such file\nand more")


class Broken:
    """A block's forward pass that the compiler can make, unlike its backward pass, in any number of windows."""

    def __init__(self, forward: Any) -> None:
        self.windows: int | None = None
        self._forward = forward

    def __call__(self, hidden: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        self.windows = len(hidden)
        computed: torch.Tensor = Failing.apply(self._forward(hidden, *arguments, **options))  # type: ignore[no-untyped-call]
        return computed


@pytest.mark.usefixtures("_process_group_ends")
@pytest.mark.thorough
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_model_that_cannot_be_compiled_trains_all_the_same(
    is_sharded: bool, small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if nobody had tried: FSDP2 would take the first batch's backward pass for the rest of the failed one."""
    team = only_one() if is_sharded else Team(CPU)
    if not is_sharded:
        dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    config = with_model(small_config.to_manifest_content(), MODELS["llama"], num_hidden_layers=2)
    weights, said = list[Any](), list[str]()
    for fails in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", Broken)
            model = assemble_model(config, ByteTokenizer(), team, WorkerOptions(compile=fails), None)
        replica = ModelReplica(config, model, load_data(config, ByteTokenizer()).samples, team, micro_batch=2)
        with watched_by(lambda stage, share: said.append(stage)):
            broken = [block.forward for block in transformer_blocks(model) if fails]
            keep_compiled_if_it_works(replica, team)
        assert all("forward" not in vars(block) for block in transformer_blocks(model))
        assert all(parameter.grad is None for parameter in model.parameters())
        theta = initial_theta(config)
        replica.train(theta, 0, LEASE, 3)
        replica.store(theta)
        weights.append(theta)
    assert said == ["compiling", "not compiling, which would be faster: fatal error: Python.h: No such file."]
    assert broken[0].windows == 2, "it is compiled for what is trained at once"
    assert np.array_equal(*weights)


def test_a_gpu_that_is_full_is_no_fault_of_the_compiler(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays compiled for training, which runs out of memory as well, and then goes on with half the windows."""
    samples = load_data(small_config, ByteTokenizer()).samples

    def full(*arguments: Any, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "compile", lambda forward: full)
    replica = ModelReplica(small_config, build_model(small_config, ByteTokenizer()), samples, micro_batch=2)
    compile_blocks(replica.model)
    keep_compiled_if_it_works(replica, Team(CPU))
    assert all(block.forward is full for block in transformer_blocks(replica.model))
    with pytest.raises(torch.OutOfMemoryError):
        replica.train(initial_theta(small_config), 0, LEASE, 1)


@pytest.mark.usefixtures("_process_group_ends")
def test_bf16_is_about_the_same_sharded_or_not(small_content: dict[str, Any], small_config: RunConfig) -> None:
    training = small_content["training"] | {"precision": "bf16", "gradient_reduction": "bf16"}
    config = RunConfig.from_manifest_content(small_content | {"training": training})
    exact, _ = trained(small_config, Team(CPU))
    for team in (Team(CPU), only_one()):
        loss, local = trained(config, team)
        assert loss == pytest.approx(exact, rel=1e-2)
        assert loss != exact
        assert np.isfinite(local).all()


def test_blocks_are_the_layers_and_attention_is_torchs_own(small_config: RunConfig) -> None:
    model = build_skeleton(small_config, ByteTokenizer())
    assert transformer_blocks(model) == list(model.model.layers)
    assert model.config._attn_implementation == "sdpa"
    assert not has_other_tensors(model)
    model.model.remembered = torch.zeros(1)
    assert has_other_tensors(model)


def test_too_little_memory_is_said_before_the_model_is_built(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("the model is built")

    monkeypatch.setattr(assembly, "build_model", refuse)
    monkeypatch.setattr("opendiloco.shared_memory.available_memory", lambda: 100_000)
    with pytest.raises(MachineError, match=r"Training this model: \d+ MiB are needed, 0 MiB are free"):
        assemble_model(small_config, ByteTokenizer(), Team(CPU), WorkerOptions(), memory_descriptor=0)
