from __future__ import annotations

import copy
import json
import re
import tomllib
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opendiloco.config.data import DataSection
from opendiloco.config.run_config import CodecSection, RoundsSection, RunConfig
from opendiloco.run import Run
from peers.errors import ManifestError
from peers.log.settings import RunSettings, Timing
from peers.presence.heartbeat import Heartbeat
from peers.values.identity import Identity

REPOSITORY = Path(__file__).parents[3]
PEER = "12D3KooWQE7cWkkyFcy3roYhgU3HrK8QfkMsc6CA6PNs8bTgKGjK"  # as test ids have it, which must not change


@pytest.mark.parametrize(("folder", "name"), [("examples", "tiny"), ("opendiloco", "demo")])
def test_runs_that_come_with_us_survive_the_way_through_a_manifest(folder: str, name: str) -> None:
    config = RunConfig.from_toml(REPOSITORY / folder / f"{name}.toml")
    carried = json.loads(json.dumps(config.to_manifest_content()))
    assert RunConfig.from_manifest_content(carried) == config
    assert RunConfig.from_manifest_content(carried).to_manifest_content() == carried
    assert config.name == name


def test_own_values_keep_half_of_the_weight_where_they_are_newer(small_content: dict[str, Any]) -> None:
    streaming = [{}, {"overlap": 1}, {"overlap": 1, "alpha": 0.25}, {"alpha": 1.0}]
    configs = [RunConfig.from_manifest_content(small_content | {"streaming": section}) for section in streaming]
    assert [config.streaming.mixing for config in configs] == [0.0, 0.5, 0.25, 1.0]
    assert [config.streaming.is_plain for config in configs] == [True, False, False, False]


def test_the_schedule_gives_the_number_of_outer_steps_unless_the_file_does(small_content: dict[str, Any]) -> None:
    assert RunConfig.from_manifest_content(small_content).total_outer_steps == 7  # 26 inner steps, 4 at a time
    assert RunConfig.from_manifest_content(small_content | {"outer_steps": 3}).total_outer_steps == 3


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("training.batch_size", 0, "training.batch_size = 0: too small. Use 1 or more."),
        ("training.batch_size", "8", "training.batch_size = '8': not a whole number."),
        ("training.batch_sise", 8, "training.batch_sise = 8: unknown key. Did you mean batch_size?"),
        ("training.sequence_length", 64, "training.sequence_length = 64 is longer than model.config.max_position"),
        (
            "model.config.vocab_size",
            256,
            "model.config.vocab_size = 256 is smaller than the tokenizer's 259 tokens; raise it",
        ),
        ("model.path", "somewhere", "model: needs either a table [model.config] or a path; give one of them"),
        ("admission", {"mode": "closed"}, "admission.mode = 'closed': not known here. Use 'open' or 'invite'."),
        ("admission", {"probation": -1}, "admission.probation = -1: too small. Use 0 or more."),
        (
            "archives",
            ["12D3KooW"],
            "archives.0 = '12D3KooW': not the peer id of an Ed25519 key. Use one as `diloco-peer b",
        ),
        ("archives", "12D3KooW", "archives = '12D3KooW': not a list. Write its values between square brackets."),
        ("archives", [PEER, PEER], f"archives names {PEER} twice; name it once."),
        ("archives", [Identity.generate().peer_id for _ in range(9)], "archives = "),
        ("admission", {"probaton": 3}, "admission.probaton = 3: unknown key. Did you mean probation?"),
        ("model.config.model_type", 3, "model: [model.config] has no model_type; name the architecture"),
        ("tokenizer", {"kind": "pretrained"}, 'tokenizer: kind = "pretrained" needs a path'),
        ("tokenizer", {"kind": "file"}, 'tokenizer: kind = "file" needs a path'),
        ("tokenizer", {"end": "</s>"}, 'tokenizer: path, end and digest need kind = "pretrained" or "file"'),
        ("data.sources", [{"source": "a"}], "data: both source and [[data.sources]] are given; move source into"),
        ("data", {"sources": [{"source": "a", "weihgt": 1}]}, "data.sources.0.weihgt = 1: unknown key. Did you mean w"),
        ("data", {"sources": [{"source": "a", "weight": -1}]}, "data.sources.0.weight = -1: too small. Use 0"),
        (
            "data",
            {"sources": [{"source": "a", "weight": 0}]},
            "data: all weights are 0, so no source would be read; give",
        ),
        ("data", {"sources": [{"source": ""}]}, "data.sources.0.source = '': empty. Give a text."),
        ("data", {"sources": [{"source": "a"}] * 65}, "data.sources = "),
        ("data", {"sources": "a"}, "data.sources = 'a': not a list."),
        (
            "data",
            {"sources": [{"source": "a", "streaming": 1}]},
            "data.sources.0.streaming = 1: neither true nor false",
        ),
        (
            "data",
            {"sources": [{"source": "a", "shards": 3}]},
            "data.sources.0: shards and windows_per_shard go togethe",
        ),
        ("data", {"sources": [{"source": "stdlib", "streaming": True}]}, 'data.sources.0: source = "stdlib" has no sh'),
        (
            "data",
            {"sources": [{"source": "a", "weight": 0.123457}, {"source": "b"}]},
            "data: these weights need a cycle of 1123457 samples, and at most 10000 are allowed; use rounder weights",
        ),
        ("training.document_mask", 1, "training.document_mask = 1: neither true nor false."),
        ("data.held_out", 1.5, "data.held_out = 1.5: too large. Use a number below 1"),
        ("inner_optimizer.learning_rate", float("nan"), "inner_optimizer.learning_rate = nan: "),
        ("inner_optimizer.betas", [0.9, 1.0], "inner_optimizer.betas.1 = 1.0: too large. Use a number below 1"),
        ("inner_optimizer.on_join", "copy", "inner_optimizer.on_join = 'copy'"),
        ("schedule.warmup_steps", -1, "schedule.warmup_steps = -1: too small. Use 0 or more."),
        ("outer_optimizer.kind", "adam", "outer_optimizer.kind = 'adam': not known here. Use 'nesterov'."),
        (
            "codec",
            {"kind": "fp4"},
            "codec.kind = 'fp4': not known here. Use 'int8', ",
        ),
        (
            "streaming",
            {"overlap": 4},
            "streaming.overlap = 4: an average would be merged after the next one of its fragment has",
        ),
        ("streaming", {"alpha": 1.5}, "streaming.alpha = 1.5: too large. Use 1.0 or less."),
        ("streaming", {"pattern": "random"}, "streaming.pattern = 'random': not known here. Use 'strided', "),
        ("streaming", {"layers_per_fragment": 0}, "streaming.layers_per_fragment = 0: too small. Use 1 or more."),
        (
            "streaming",
            {"pattern": "balanced", "embeddings": "apart"},
            'streaming: pattern = "balanced" places the embeddings itself, by their size; remove embeddings.',
        ),
        ("rounds", {"minimum_peers": 0}, "rounds.minimum_peers = 0: too small. Use 1 or more."),
        ("rounds", {"heartbeat_seconds": 5.0}, "rounds: heartbeat_expiry_seconds = 10 would count a peer as gone"),
        (
            "rounds",
            {"contributions": 0.5},
            'rounds: contributions = 0.5 needs policy = "asynchronous"; set that, or remove',
        ),
        ("rounds", {"policy": "asynchronous", "staleness": 0}, "rounds: staleness = 0 would lose the work of a peer"),
        ("rounds", {"contributions": 1.5}, "rounds.contributions = 1.5: too large. Use 1.0 or less."),
        ("name", "Big Run", "name = 'Big Run': not usable. Use 1 to 40 lower-case letters, digits and dashes."),
        ("name", "a" * 41, f"name = '{'a' * 41}': not usable. Use 1 to 40 lower-case"),
        ("training", 3, "training = 3: not a table. Write its keys below a line [training]."),
        ("model.config", "llama", "model.config = 'llama': not a table. Write its keys below a line [model.config]."),
        ("inner_optimizer.betas", 0.9, "inner_optimizer.betas = 0.9: not a list. Write its values between square"),
        ("training.inner_steps", 10**18, "training.inner_steps = 1000000000000000000: too large. Use 1000000 or less."),
        ("training.batch_size", 10**30, "training.batch_size = 1000000000000000000000000000000: too large."),
        ("training.sequence_length", 10**7, "training.sequence_length = 10000000: too large."),
        ("schedule.stable_steps", 10**15, "schedule.stable_steps = 1000000000000000: too large."),
        ("outer_optimizer.learning_rate", 1e39, "outer_optimizer.learning_rate = 1e+39: too large. Use 100.0 or less."),
        ("inner_optimizer.learning_rate", 1e39, "inner_optimizer.learning_rate = 1e+39: too large."),
        ("rounds", {"heartbeat_expiry_seconds": 301.0}, "rounds.heartbeat_expiry_seconds = 301.0: too large. Use 300"),
        ("rounds", {"grace_seconds": 1e300}, "rounds.grace_seconds = 1e+300: too large. Use 86400"),
        ("extra", 1, "extra = 1: unknown key."),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy(
    small_content: dict[str, Any], path: str, value: object, said: str
) -> None:
    content = copy.deepcopy(small_content)
    *folders, key = path.split(".")
    table = content
    for folder in folders:
        table = table[folder]
    table[key] = value
    with pytest.raises(ManifestError) as caught:
        RunConfig.from_manifest_content(content)
    assert str(caught.value).startswith(f"manifest: {said}")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("named", "archives"),
    [(None, "organiser"), ([], ""), (["other"], "other"), (["other", "organiser"], "other organiser")],
)
def test_the_organisers_key_is_an_archives_unless_the_file_says_who_is(
    small_content: dict[str, Any], named: list[str] | None, archives: str
) -> None:
    keys = {"organiser": Identity.generate(), "other": Identity.generate()}
    content = small_content if named is None else small_content | {"archives": [keys[name].peer_id for name in named]}
    signed = Run.sign(RunConfig.from_manifest_content(content), keys["organiser"])
    assert signed.manifest.archives == tuple(keys[name].peer_id for name in archives.split())
    assert Run.from_manifest(signed.manifest) == signed


def test_the_longest_expiry_fits_a_heartbeat(small_content: dict[str, Any]) -> None:
    """And the longest name is one of 40 characters."""
    content = small_content | {"name": "a" * 40, "rounds": {"heartbeat_expiry_seconds": 300.0}}
    timing = Run.sign(RunConfig.from_manifest_content(content), Identity.generate()).settings.timing
    [lifetime] = [part.le for part in Heartbeat.model_fields["lifetime"].metadata if hasattr(part, "le")]
    assert 2 * timing.heartbeat_expiry <= lifetime  # what `Pulse.heartbeat` says of itself


def numbers_in(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every number of a JSON schema, by its path in it."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield path, schema
        for key, part in schema.items():
            yield from numbers_in(part, f"{path}/{key}")
    if isinstance(schema, list):
        for number, part in enumerate(schema):
            yield from numbers_in(part, f"{path}/{number}")


def test_every_number_of_a_manifest_has_bounds() -> None:
    """A manifest with heartbeat_seconds = 1e-9 ended the archive of all runs."""
    found = dict(numbers_in(RunConfig.model_json_schema()))
    assert len(found) > 50
    for path, schema in found.items():
        assert {"minimum", "exclusiveMinimum"} & schema.keys(), f"{path} has no lower bound"
        assert {"maximum", "exclusiveMaximum"} & schema.keys(), f"{path} has no upper bound"


def leaves(content: Any) -> Iterator[tuple[dict[str, Any] | list[Any], Any]]:
    """Where each number of a manifest's content is: a container and its key."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield content, key
        yield from leaves(value)


EXTREMES = (-1, 0, 1, 10**6, 10**9, 10**12, 10**15, 10**18, 10**400, 5e-324, 1e-9, 0.1, 1e30, 1e308)


def test_accepted_numbers_come_to_nothing_absurd(small_content: dict[str, Any]) -> None:
    """Any number of a manifest is set to anything: it is refused as an error of the manifest, or can be worked with."""
    content = RunConfig.from_manifest_content(small_content).to_manifest_content()
    del content["model"]["config"]["max_position_embeddings"]  # which would bound a sequence
    content["streaming"] |= {"layers_per_fragment": 1, "sizes": [500, 600]}
    content["rounds"]["contributions"], content["rounds"]["policy"] = 0.5, "asynchronous"
    content["data"]["sources"], content["data"]["source"] = [{"source": "a", "shards": 2, "windows_per_shard": 9}], None
    organiser, accepted = Identity.generate(), 0
    RunConfig.from_manifest_content(copy.deepcopy(content))
    for table, key in leaves(content):
        before = table[key]
        for extreme in EXTREMES:
            table[key] = float(extreme) if isinstance(before, float) and extreme < 10**300 else extreme
            try:
                config = RunConfig.from_manifest_content(copy.deepcopy(content))
            except ManifestError:
                continue
            settings = Run.sign(config, organiser).settings
            assert settings.timing.heartbeat >= 0.1
            assert settings.timing.heartbeat_expiry <= 300
            lease = settings.samples_per_lease * settings.tokens_per_sample
            assert 1000 * config.total_outer_steps * lease < 2**62, "more tokens than the log can carry"
            assert config.training.batch_size * config.training.sequence_length <= 10**8
            assert config.evaluation.windows * config.training.sequence_length <= 10**8
            assert sum(config.data.shares) <= 10_000
            accepted += 1
        table[key] = before
    assert accepted > 100


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"training": {"inner_steps": 1, "batch_size": 10**6, "sequence_length": 10**6}},
            "training: batch_size = 1000000 * sequence_length = 1000000 is 1e+12 tokens; make them 1e+08 at most.",
        ),
        (
            {"training": {"inner_steps": 10**6, "batch_size": 10**3, "sequence_length": 10**4}},
            "training: inner_steps = 1000000 * batch_size = 1000 * sequence_length = 10000 is 1e+13 tokens; make them",
        ),
        (
            {
                "evaluation": {"windows": 10**6},
                "training": {"inner_steps": 1, "batch_size": 1, "sequence_length": 1000},
            },
            "evaluation.windows = 1000000 * training.sequence_length = 1000 is 1e+09 tokens; make them 1e+08 at most.",
        ),
        (
            {"outer_steps": 10**6, "training": {"inner_steps": 10**6, "batch_size": 1000, "sequence_length": 100}},
            "1000000 outer steps of 100000000000 tokens are more than the 1000000000000000 tokens that a run may have;",
        ),
        (
            {"streaming": {"layers_per_fragment": 1, "sizes": [10**12, 1]}},
            "streaming: sizes add up to 1000000000001 values; make them 1000000000000 at most.",
        ),
        (
            {"inner_optimizer": {"kind": "torch", "learning_rate": 1.0, "name": "SGD", "options": {"momentum": 1e300}}},
            "inner_optimizer: options.momentum = 1e+300: too large. Use 1e+30 or less.",
        ),
    ],
)
def test_numbers_that_are_too_large_together_are_named(
    small_content: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    content = copy.deepcopy(small_content) | change
    del content["model"]["config"]["max_position_embeddings"]
    with pytest.raises(ManifestError) as caught:
        RunConfig.from_manifest_content(content)
    assert str(caught.value).startswith(f"manifest: {said}")


def test_a_file_with_thousands_of_problems_is_answered_with_a_few(small_content: dict[str, Any]) -> None:
    with pytest.raises(ManifestError) as caught:
        RunConfig.from_manifest_content(small_content | {f"key{number}": number for number in range(5000)})
    heading, *lines = str(caught.value).splitlines()
    assert (heading, len(lines)) == ("manifest: 5000 problems:", 20)


def test_a_long_key_above_many_values_takes_no_memory(small_content: dict[str, Any]) -> None:
    """Regression: the path to each value was written out, and a manifest of 60 kB took gigabytes of any node."""
    content = copy.deepcopy(small_content)
    content["model"]["config"]["a" * 20_000] = [0] * 2000
    tracemalloc.start()
    RunConfig.from_manifest_content(content)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 10_000_000


HOSTILE = "\x1b[2J\nerror: all is well"


@pytest.mark.parametrize(
    "change",
    [
        {HOSTILE: 1},
        {"model": {"config": {"model_type": "llama", HOSTILE: 1 << 40}}},
        {"model": {"config": {"model_type": "llama", "sub_configs": HOSTILE}}},
        {"inner_optimizer": {"kind": "torch", "name": "SGD", "learning_rate": 0.1, "options": {HOSTILE: 1e300}}},
    ],
)
def test_a_strangers_key_writes_no_lines_of_its_own(small_content: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(ManifestError) as caught:
        RunConfig.from_manifest_content(small_content | change)
    assert caught.value.message.isprintable()


def test_several_problems_get_a_line_each(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "x"\n[training]\ninner_steps = 0\nbatch_size = 1\nsequence_length = 8\n', encoding="utf-8")
    with pytest.raises(ManifestError) as caught:
        RunConfig.from_toml(path)
    heading, *lines = str(caught.value).splitlines()
    assert heading == f"{path}: 4 problems:"
    assert "  training.inner_steps = 0: too small. Use 1 or more." in lines
    assert "  model: is missing. Add it." in lines


@pytest.mark.parametrize(("sizes", "said"), [([], "too few. Give at least 1."), ([-1], "too small. Use 1 or more.")])
def test_an_empty_list_is_a_problem_beside_others_and_one_of_wrong_values_is_not_too_short(
    small_content: dict[str, Any], sizes: list[int], said: str
) -> None:
    content = small_content | {"outer_steps": 0, "streaming": {"sizes": sizes}}
    with pytest.raises(ManifestError) as caught:
        RunConfig.from_manifest_content(content)
    heading, *lines = str(caught.value).splitlines()
    assert heading == "manifest: 2 problems:"
    assert [line for line in lines if "streaming.sizes" in line and line.endswith(said)], lines


@pytest.mark.parametrize(
    ("text", "said"), [(None, "cannot be read"), ("name = ", "not valid TOML"), ('name = "\xff"', "not valid TOML")]
)
def test_a_file_that_is_not_there_or_not_toml(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "run.toml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ManifestError, match=said) as caught:
        RunConfig.from_toml(path)
    assert caught.value.remedy


def test_an_empty_schedule_needs_outer_steps(small_content: dict[str, Any]) -> None:
    empty = {"warmup_steps": 0, "stable_steps": 0, "decay_steps": 0}
    with pytest.raises(ManifestError, match="the schedule has 0 steps; give"):
        RunConfig.from_manifest_content(small_content | {"schedule": empty})


def test_numbers_that_json_cannot_carry_are_refused(small_content: dict[str, Any]) -> None:
    content = copy.deepcopy(small_content)
    content["model"]["config"]["rope_theta"] = float("inf")
    with pytest.raises(ManifestError, match="model"):
        RunConfig.from_manifest_content(content)


def test_the_timing_has_one_set_of_defaults() -> None:
    """Regression: the file's and the protocol's were different."""
    rounds, timing = RoundsSection(), Timing()
    assert rounds.heartbeat_seconds == timing.heartbeat
    assert rounds.heartbeat_expiry_seconds == timing.heartbeat_expiry
    assert rounds.grace_seconds == timing.grace
    assert rounds.round_timeout_seconds == timing.round_timeout
    assert rounds.partition_grace_seconds == timing.partition_grace


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((1,), (1,)),
        ((2.5,), (1,)),
        ((0.7, 0.2, 0.1), (7, 2, 1)),
        ((30, 70), (3, 7)),
        ((1, 1.5), (2, 3)),
        ((1e-3, 1), (1, 1000)),
    ],
)
def test_weights_are_whole_shares_in_their_exact_proportions(
    weights: tuple[float, ...], shares: tuple[int, ...]
) -> None:
    sources = [{"source": "stdlib", "weight": weight} for weight in weights]
    assert DataSection.model_validate({"sources": sources}).shares == shares


def test_one_source_has_a_short_form(small_content: dict[str, Any]) -> None:
    table = {"source": "some/texts", "split": "all", "column": "body"}
    short, long = (DataSection.model_validate(data) for data in (table, {"sources": [table]}))
    assert short.all_sources == long.all_sources
    assert short.shares == long.shares == (1,)
    assert [section.source for section in DataSection().all_sources] == ["stdlib"]
    for data in ({}, table, {"sources": [table, {"source": "stdlib", "weight": 3}]}):
        config = RunConfig.from_manifest_content(small_content | {"data": data})
        assert RunConfig.from_manifest_content(json.loads(json.dumps(config.to_manifest_content()))) == config


def test_what_the_documentation_shows_of_data_is_accepted(small_content: dict[str, Any]) -> None:
    text = (REPOSITORY / "docs" / "data.md").read_text(encoding="utf-8")
    shown = [tomllib.loads(block) for block in re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
    configs = [RunConfig.from_manifest_content(small_content | block) for block in shown]
    assert [section.source for section in configs[0].data.all_sources] == ["./texts"]
    assert configs[1].data.shares == (14, 5, 1), "as it says below"
    assert configs[2].tokenizer.kind == "file"


def test_half_is_enough_where_an_asynchronous_run_does_not_say_how_much(small_content: dict[str, Any]) -> None:
    def settings(**rounds: Any) -> RunSettings:
        config = RunConfig.from_manifest_content(small_content | {"rounds": rounds})
        return Run.sign(config, Identity.generate()).settings

    assert settings().contributions is None
    assert settings(policy="asynchronous").contributions == 0.5
    assert settings(policy="asynchronous", contributions=1.0).contributions == 1.0


def test_a_changed_configuration_is_checked_like_a_file(small_content: dict[str, Any]) -> None:
    """Regression: the documentation changed values with `model_copy`, which accepts any key and any value."""
    config = RunConfig.from_manifest_content(small_content)
    assert config.changed({"codec": {"error_feedback": 1.0}}).codec.error_feedback == 1.0
    assert config.changed({"codec": {"error_feedback": 1.0}}).training == config.training
    for codec, problem in (
        ({"eror_feedback": 1.0}, r"codec\.eror_feedback = 1\.0: .* error_feedback"),
        ({"kind": "int9"}, "int9"),
    ):
        with pytest.raises(ManifestError, match=f"^changed: .*{problem}"):
            config.changed({"codec": codec})


def test_another_kind_of_codec_brings_its_own_contributions(small_content: dict[str, Any]) -> None:
    """Regression: a changed `codec.kind` left contributions in the former format."""
    config = RunConfig.from_manifest_content(small_content)
    for kind in ("e2m1", "sparse"):
        assert config.changed({"codec": {"kind": kind}}).codec == CodecSection(kind=kind)
