"""The runs that come as examples are loadable, as large as they say, and the small ones train."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from opendiloco.cli import main
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.model.build import build_skeleton
from opendiloco.quantities import days_in_words, in_words
from opendiloco.training.reference import Reference, Work
from opendiloco.training.team import Team
from opendiloco.workers import assembly
from opendiloco.workers.needs import MACHINES, needs_of, worker_memory
from peers.values.leases import SampleRange

ROOT = Path(__file__).parents[2]
PARAMETERS = {
    "llama-2m": 1_968_384,
    "llama-15m": 15_441_408,
    "llama-150m": 214_983_680,
    "llama-1b": 1_100_048_384,
    "llama-10b": 10_211_381_248,
}


WAYS = "streaming", "asynchronous", "sparse"
"""llama-2m, trained in another way."""

OPEN_DILOCO = "github.com/PrimeIntellect-ai/OpenDiloco a5b7236, "
README = OPEN_DILOCO + "README.md: "
TRAIN_FSDP = OPEN_DILOCO + "open_diloco/train_fsdp.py: "
LLAMA_CONFIG = "defaults of transformers.LlamaConfig, on which config_150m.json and config_1b.json build"
PRIME = "github.com/PrimeIntellect-ai/prime, "
COOLDOWN = PRIME + "3b81752 configs/10B/H100_cooldown.toml: "
H100 = PRIME + "3b81752 configs/10B/H100.toml: "
ZEROBAND = PRIME + "006b3f6 src/zeroband/config.py: "
LLAMA = PRIME + "040575e src/zeroband/models/llama: "
ZEROBAND_TRAIN = PRIME + "01baf16 src/zeroband/train.py: "

OPEN_DILOCO_RUN = {
    "model.config.model_type": ("llama", OPEN_DILOCO + "open_diloco/configs: LlamaForCausalLM"),
    "model.config.vocab_size": (32_000, LLAMA_CONFIG),
    "model.config.max_position_embeddings": (2048, LLAMA_CONFIG),
    "model.config.tie_word_embeddings": (False, LLAMA_CONFIG),
    "tokenizer.kind": ("pretrained", TRAIN_FSDP + "get_model"),
    "tokenizer.path": ("mistralai/Mistral-7B-v0.1", TRAIN_FSDP + "AutoTokenizer.from_pretrained"),
    "data.sources.0.source": ("allenai/c4", TRAIN_FSDP + "dataset_name_or_path"),
    "data.sources.0.subset": ("en", TRAIN_FSDP + "load_dataset"),
    "training.sequence_length": (1024, TRAIN_FSDP + "seq_length"),
    "training.document_mask": (False, TRAIN_FSDP + "attn_implementation = sdpa, one document a window"),
    "training.gradient_clip": (1.0, TRAIN_FSDP + "clip_grad_norm_(1.0)"),
    "training.z_loss": (0.0, TRAIN_FSDP + "outputs.loss"),
    "training.precision": ("bf16", README + "--precision bf16-mixed"),
    "training.activation_checkpointing": (False, TRAIN_FSDP + "none"),
    "inner_optimizer.kind": ("adamw", TRAIN_FSDP + "inner_optimizer"),
    "inner_optimizer.learning_rate": (4e-4, README + "--lr 4e-4"),
    "inner_optimizer.betas": ((0.9, 0.95), TRAIN_FSDP + "inner_optimizer"),
    "inner_optimizer.epsilon": (1e-8, "torch.optim.AdamW's default"),
    "inner_optimizer.weight_decay": (0.1, TRAIN_FSDP + "inner_optimizer"),
    "inner_optimizer.decays": ("all", TRAIN_FSDP + "params = model.parameters()"),
    "schedule.kind": ("cosine", TRAIN_FSDP + "get_cosine_schedule_with_warmup"),
    "schedule.warmup_steps": (1000, TRAIN_FSDP + "warmup_steps"),
    "schedule.decay_steps": (88_000 - 1000, README + "--total-steps 88_000, less the warmup"),
    "schedule.final_fraction": (0.0, TRAIN_FSDP + "get_cosine_schedule_with_warmup"),
    "outer_optimizer.kind": ("nesterov", TRAIN_FSDP + "outer_optimizer"),
    "outer_optimizer.learning_rate": (0.7, TRAIN_FSDP + "outer_lr"),
    "outer_optimizer.momentum": (0.9, TRAIN_FSDP + "outer_optimizer"),
}
CONFIG_150M = OPEN_DILOCO + "open_diloco/configs/config_150m.json"
CONFIG_1B = OPEN_DILOCO + "open_diloco/configs/config_1b.json"
CLAIMS: dict[str, dict[str, tuple[Any, str]]] = {
    "llama-150m": OPEN_DILOCO_RUN
    | {
        "model.config.hidden_size": (1024, CONFIG_150M),
        "model.config.intermediate_size": (2688, CONFIG_150M),
        "model.config.num_hidden_layers": (12, CONFIG_150M),
        "model.config.num_attention_heads": (16, CONFIG_150M),
        "model.config.rms_norm_eps": (1e-5, CONFIG_150M),
        "training.inner_steps": (500, README + "--hv.local-steps 500"),
        "training.batch_size": (512, README + "--total-batch-size 512"),
        "training.micro_batch": (8, README + "--per-device-train-batch-size 8"),
        "training.gradient_reduction": ("fp32", README + "run_training.sh 8 1: one GPU a worker, nothing to reduce"),
    },
    "llama-1b": OPEN_DILOCO_RUN
    | {
        "model.config.hidden_size": (2048, CONFIG_1B),
        "model.config.intermediate_size": (5632, CONFIG_1B),
        "model.config.num_hidden_layers": (22, CONFIG_1B),
        "model.config.num_attention_heads": (32, CONFIG_1B),
        "model.config.num_key_value_heads": (4, CONFIG_1B),
        "model.config.rms_norm_eps": (1e-5, CONFIG_1B),
        "training.inner_steps": (125, README + "--hv.local_steps 125"),
        "training.batch_size": (2048, README + "--total-batch-size 2048"),
        "training.micro_batch": (16, README + "--per-device-train-batch-size 16"),
        "training.gradient_reduction": ("bf16", TRAIN_FSDP + "MixedPrecision(param_dtype), whose reduce_dtype follows"),
    },
    "llama-10b": {
        "model.config.model_type": ("llama", LLAMA + "Transformer"),
        "model.config.vocab_size": (128_256, ZEROBAND_TRAIN + "len(tokenizer)"),
        "model.config.hidden_size": (4096, LLAMA + "10B: dim"),
        "model.config.intermediate_size": (-(-int(1.3 * int(4 * 4096 * 2 / 3)) // 1024) * 1024, LLAMA + "FeedForward"),
        "model.config.num_hidden_layers": (42, LLAMA + "10B: n_layers"),
        "model.config.num_attention_heads": (32, LLAMA + "10B: n_heads"),
        "model.config.num_key_value_heads": (8, LLAMA + "10B: n_kv_heads"),
        "model.config.rms_norm_eps": (1e-5, LLAMA + "ModelArgs: norm_eps"),
        "model.config.max_position_embeddings": (8192, LLAMA + "max_seq_len = seq_length"),
        "model.config.tie_word_embeddings": (False, LLAMA + "Transformer: output"),
        "model.config.rope_parameters.rope_type": ("default", LLAMA + "precompute_freqs_cis"),
        "model.config.rope_parameters.rope_theta": (500_000.0, LLAMA + "10B: rope_theta"),
        "tokenizer.kind": ("pretrained", ZEROBAND_TRAIN + "AutoTokenizer.from_pretrained"),
        "tokenizer.path": ("meta-llama/Meta-Llama-3-8B", ZEROBAND_TRAIN + "AutoTokenizer.from_pretrained"),
        "training.inner_steps": (100, COOLDOWN + "diloco.inner_steps"),
        "training.batch_size": (128, COOLDOWN + "optim.batch_size"),
        "training.sequence_length": (8192, COOLDOWN + "data.seq_length"),
        "training.document_mask": (True, ZEROBAND + "data.sequence_packing"),
        "training.gradient_clip": (1.0, ZEROBAND_TRAIN + "clip_grad_norm_"),
        "training.z_loss": (2e-4, COOLDOWN + "optim.z_loss; " + ZEROBAND + "z_loss_weight"),
        "training.precision": ("bf16", ZEROBAND_TRAIN + "MixedPrecisionPolicy: param_dtype"),
        "training.gradient_reduction": ("bf16", ZEROBAND + "reduce_fp32 = False: as param_dtype"),
        "training.micro_batch": (1, COOLDOWN + "train.micro_bs"),
        "training.activation_checkpointing": (True, COOLDOWN + "train.ac_ckpt"),
        "inner_optimizer.kind": ("adamw", ZEROBAND + "AdamConfig"),
        "inner_optimizer.learning_rate": (7.5e-5, COOLDOWN + "optim.optim.lr"),
        "inner_optimizer.betas": ((0.9, 0.95), COOLDOWN + "optim.optim.betas1, betas2"),
        "inner_optimizer.epsilon": (1e-8, "torch.optim.AdamW's default"),
        "inner_optimizer.weight_decay": (0.1, COOLDOWN + "optim.optim.weight_decay"),
        "inner_optimizer.decays": ("all", ZEROBAND_TRAIN + "get_optimizer(model.parameters(), …)"),
        "schedule.kind": ("wsd", COOLDOWN + "optim.sched_type"),
        "schedule.warmup_steps": (1000, COOLDOWN + "optim.warmup_steps"),
        "schedule.stable_steps": (74_700, COOLDOWN + "optim.stable_steps"),
        "schedule.decay_steps": (90_400 - 74_700 - 1000, COOLDOWN + "optim.total_steps, less the others"),
        "schedule.decay_shape": ("sqrt", COOLDOWN + "optim.sched_type"),
        "schedule.final_fraction": (0.0, COOLDOWN + "optim.sched_type"),
        "outer_optimizer.kind": ("nesterov", PRIME + "src/zeroband/diloco.py"),
        "outer_optimizer.learning_rate": (0.7, ZEROBAND + "outer_lr"),
        "outer_optimizer.momentum": (0.9, PRIME + "src/zeroband/diloco.py"),
    }
    | {
        f"data.sources.{place}.{key}": (value, source)
        for place, (name, share) in enumerate(
            [
                ("fineweb-edu", 55),
                ("fineweb", 10),
                ("StackV1-popular", 20),
                ("dclm-baseline-1.0-parquet", 10),
                ("open-web-math", 5),
            ]
        )
        for key, value, source in (
            (
                "source",
                f"PrimeIntellect/{name}",
                PRIME + "README.md: subset_data.py; " + H100 + "dataset_name_or_paths",
            ),
            ("weight", share, H100 + "data.dataset_ratio"),
        )
    },
}
"""What a preset takes from elsewhere: each value, and the place that says it."""
OURS = {
    "name",
    "model.init_seed",
    *(f"data.sources.{place}.{key}" for place in range(5) for key in ("shards", "windows_per_shard")),
    "codec.contributions",
    "rounds.grace_seconds",
    "rounds.round_timeout_seconds",
}
"""What no other code has, or needs: how a swarm of ours reads the data, waits for its peers and takes thin uplinks."""


def flat(table: Any, path: str = "") -> dict[str, Any]:
    """Each value by its keys, joined by dots. Lists of numbers are values."""
    if isinstance(table, list) and table and isinstance(table[0], dict):
        table = dict(enumerate(table))
    if not isinstance(table, dict):
        return {path: tuple(table) if isinstance(table, list) else table}
    return {
        key: value for name, part in table.items() for key, value in flat(part, f"{path}.{name}".strip(".")).items()
    }


@pytest.mark.parametrize("name", CLAIMS)
def test_what_a_preset_takes_from_elsewhere_is_what_is_there(name: str) -> None:
    """Number by number, defaults included; and nothing in the file is of unknown origin."""
    resolved = flat(preset(name).to_manifest_content())
    wrong = {key: (resolved[key], source) for key, (value, source) in CLAIMS[name].items() if resolved[key] != value}
    assert wrong == {}
    written = flat(tomllib.loads((ROOT / "examples" / f"{name}.toml").read_text(encoding="utf-8")))
    assert written.keys() - CLAIMS[name].keys() <= OURS


def preset(name: str) -> RunConfig:
    return RunConfig.from_toml(ROOT / "examples" / f"{name}.toml")


def test_these_are_all_of_them() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.toml")} == {*PARAMETERS, *WAYS, "tiny"}
    rows = re.findall(r"^\| \[(\S+)\]\(\.\./examples/\S+\.toml\) \| ([\d,]+) \|", DOCUMENT, re.MULTILINE)
    assert {name: int(count.replace(",", "")) for name, count in rows} == PARAMETERS


DOCUMENT = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_is_a_run_of_the_size_that_it_says(name: str) -> None:
    config = preset(name)
    assert config.name == name
    carried = json.loads(json.dumps(config.to_manifest_content()))
    assert RunConfig.from_manifest_content(carried) == config
    model = build_skeleton(config, ByteTokenizer())
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama-2m", "llama-15m"])
def test_a_small_preset_trains_on_cpus_as_it_stands(name: str) -> None:
    """Two peers, on the text that every machine has; each with a lease of one window, since a whole one takes hours."""
    config = preset(name)
    torch.set_num_threads(1)
    reference = Reference(config)
    windows = torch.from_numpy(reference._data.samples.read(np.arange(1)))

    def loss() -> float:
        reference._judge.load(reference.state.theta)
        with torch.no_grad():
            return reference._judge.loss(windows).item()

    before = loss()
    reference.outer_step([Work(peer, (SampleRange(place, place + 1),), 1) for place, peer in enumerate("ab")])
    assert loss() < before


@pytest.mark.parametrize("name", WAYS)
def test_a_way_to_train_is_llama_2m_and_says_only_how_it_differs(name: str) -> None:
    ours, plain = (
        flat(tomllib.loads((ROOT / "examples" / f"{each}.toml").read_text(encoding="utf-8")))
        for each in (name, "llama-2m")
    )
    differ = {key.partition(".")[0] for key, _ in ours.items() ^ plain.items()}
    table = {"streaming": {"streaming"}, "asynchronous": {"rounds"}, "sparse": {"codec", "outer_optimizer"}}
    assert differ == {"name", *table[name]}


@pytest.mark.parametrize("name", [WAYS[0], *(pytest.param(name, marks=pytest.mark.thorough) for name in WAYS[1:])])
def test_a_way_to_train_learns(name: str) -> None:
    """Two replicas and a late one, where work may be late; with short windows, in three outer steps."""
    content = preset(name).to_manifest_content()
    content["training"] |= {"sequence_length": 32, "batch_size": 4}
    content["schedule"] |= {"warmup_steps": 1}
    torch.set_num_threads(1)
    reference = Reference(RunConfig.from_manifest_content(content))
    before, steps = reference.held_out_loss(), 6
    for index in range(3):
        place = index * 3 * 4 * steps
        work = [Work(peer, (SampleRange(place, place + 4 * steps),), steps) for peer in "ab"]
        if reference.config.rounds.enough is not None and index:
            work.append(Work("late", (SampleRange(place + 8 * steps, place + 12 * steps),), steps, age=1))
        reference.outer_step(work)
    assert reference.held_out_loss() < before


# What they need ------------------------------------------------------------------------------------------------------
def rounded(count: float | None, unit: float = 1.0, digits: int = 2) -> str:
    """Two digits are more than most of this is worth; what is needed should be no less."""
    if count is None:
        return "too small"
    return "< 0.001" if count / unit < 0.001 else f"{float(f'{count / unit:.{digits}g}'):,g}"


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_page_says_what_a_preset_needs(name: str) -> None:
    """As the code computes it that `join` checks with."""
    config = preset(name)
    skeleton = build_skeleton(config, ByteTokenizer())
    one, eight = (needs_of(config, skeleton, gpus) for gpus in (1, 8))
    traffic = 2 * one.host.payload
    sizes = one.device_memory, eight.device_memory, one.main_memory, one.main_memory_on_cpu, one.disk, traffic
    assert f"| {name} | {' | '.join(rounded(size, 1e9, 3) for size in sizes)} |" in DOCUMENT
    by_machine = [(one if machine.gpus == 1 else eight, machine) for machine in MACHINES]
    days = [needs.days(machine) for needs, machine in by_machine]
    times = [rounded(each) for each in days]
    bits = [None if each is None else needs.link(each)[1] for each, (needs, _) in zip(days, by_machine, strict=True)]
    links = [rounded(each, 1e6) for each in bits]
    row = (
        f"| {name} | {one.outer_steps:,} | {rounded(one.tokens, 1e9, 3)} | {' | '.join(times)} | {' | '.join(links)} |"
    )
    assert row in DOCUMENT


def test_what_join_checks_is_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    config = preset("llama-15m")
    asked: list[int] = []
    monkeypatch.setattr(assembly, "check_available", lambda what, needed: asked.append(needed))
    skeleton = build_skeleton(config, ByteTokenizer())
    team = Team(torch.device("cpu"))
    memory = worker_memory(skeleton, config.training, "cpu", 1)
    assembly._check_memory(memory, team, True, config.codec)
    assert asked == [needs_of(config, skeleton).main_memory_on_cpu]


def test_the_command_says_it_without_a_network() -> None:
    done = CliRunner().invoke(main, ["run", "needs", str(ROOT / "examples" / "llama-10b.toml")])
    assert done.exit_code == 0, done.output
    assert "10,211,381,248 parameters; 904 outer steps, 94,791,270,400 tokens of each peer" in done.output
    assert "H100: 203 GB of each GPU, and activations: it is too small" in done.output
    assert "8 H100: 34.1 GB of each GPU, and activations; 23 days at 40% of its peak" in done.output
    assert "a contribution: 10.3 GB in int8, 5.15 GB in e2m1, 289 MB in sparse; " in done.output
    assert "  uplink in Mbit/s for a contribution in 4 min: int8 330, e2m1 170, sparse 9.4\n" in done.output
    assert re.search(r"^8 CPU cores: \d+ days at 0.3 TFLOP/s; `diloco-peer doctor --run` measures", done.output, re.M)


def test_the_command_knows_where_moments_are() -> None:
    """A billion parameters train on 16 GB then; their moments take 8.8 GB of main memory."""
    done = CliRunner().invoke(main, ["run", "needs", "--json", str(ROOT / "examples" / "llama-1b.toml")])
    kept = [
        CliRunner().invoke(
            main, ["run", "needs", "--json", "--optimizer-state", each, str(ROOT / "examples" / "llama-1b.toml")]
        )
        for each in ("host", "8bit")
    ]
    device, host, bits = (json.loads(each.stdout) for each in (done, *kept))
    assert device["gpu_memory"] - host["gpu_memory"] == 8 * PARAMETERS["llama-1b"]
    assert host["main_memory"] - device["main_memory"] == 8 * PARAMETERS["llama-1b"]
    assert host["gpu_memory"] < bits["gpu_memory"] < 16e9 < device["gpu_memory"]
    assert bits["main_memory"] == device["main_memory"]
    assert host["main_memory_on_cpu"] - device["main_memory_on_cpu"] < 1e9


def test_of_a_small_run_it_says_what_a_person_can_read() -> None:
    """Regression: days were 1.2e-08, and links of 140,000 Mbit/s asked for."""
    done = CliRunner().invoke(main, ["run", "needs", str(ROOT / "examples" / "tiny.toml")])
    assert done.exit_code == 0, done.output
    assert "disk: 4.69 MB for checkpoints" in done.output
    assert "each outer step: 235 kB to send" in done.output
    little = "less than a minute at 40% of its peak, and more for rounds, whatever its link"
    assert f"RTX 4090: 539 MB of each GPU, and activations; {little}\n" in done.output
    assert "8 CPU cores: less than a minute at 0.3 TFLOP/s" in done.output
    assert "e-0" not in done.output


def test_bytes_and_times_in_words() -> None:
    assert [in_words(count) for count in (999, 2_000, 1_234_567, 194_400_000_000, 10**13)] == [
        *("0.999 kB", "2 kB", "1.23 MB", "194 GB", "10 TB")
    ]
    assert [days_in_words(days) for days in (230.4, 1.0, 0.24, 0.0064, 1e-8)] == [
        *("230 days", "1 day", "5.8 hours", "9.2 minutes", "less than a minute")
    ]
