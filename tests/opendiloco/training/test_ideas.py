"""Ideas in Python: an outer optimizer, a codec and a pattern of fragments that are given to the reference."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opendiloco import kernels
from opendiloco.config.run_config import RunConfig, StreamingSection
from opendiloco.errors import ArgumentError, WorkerError
from opendiloco.model.layout import Layout
from opendiloco.shared_memory import Vector
from opendiloco.training.reference import Codec, Participant, Reference, Work, run_codec
from peers.values.chunks import digest_of_state
from peers.values.leases import SampleRange

PAGE = Path(__file__).parents[3] / "docs" / "library.md"
PLAIN = {"learning_rate": 0.7, "momentum": 0.6}
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.6, nesterov=True)


def unchanged(values: Vector) -> Vector:
    return values


EXACT = Codec(encode=unchanged, decode=unchanged)


def config_of(small_content: dict[str, Any], **changes: Any) -> RunConfig:
    content = copy.deepcopy(small_content) | changes
    content["model"]["config"]["num_hidden_layers"] = 2
    return RunConfig.from_manifest_content(content)


def train(reference: Reference, outer_steps: int = 3, steps: int = 4) -> list[bytes]:
    def work(index: int, number: int) -> Work:
        first = 2 * steps * (2 * index + number)
        return Work("ab"[number], (SampleRange(first, first + 2 * steps),), steps)

    return list(reference.run([[work(index, number) for number in range(2)] for index in range(outer_steps)]))


# An outer optimizer --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("streaming", [{}, {"layers_per_fragment": 1, "overlap": 1}], ids=["whole", "in fragments"])
def test_torchs_nesterov_takes_the_runs_own_steps(small_content: dict[str, Any], streaming: dict[str, Any]) -> None:
    """But for rounding: torch multiplies and adds in another order."""
    config = config_of(small_content, outer_optimizer=PLAIN, streaming=streaming)
    own, given = Reference(config, codec=EXACT), Reference(config, codec=EXACT, outer_optimizer=NESTEROV)
    before = own.state.theta.copy()
    train(own)
    train(given)
    moved = np.abs(own.state.theta - before).max()
    assert np.abs(given.state.theta - own.state.theta).max() < 1e-4 * moved


def test_an_optimizer_has_the_models_tensors_of_one_fragment_and_their_gradients(small_content: dict[str, Any]) -> None:
    config = config_of(small_content, streaming={"layers_per_fragment": 1})
    made: list[torch.optim.Optimizer] = []

    def of_tensors(tensors: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(tensors, lr=1.0))
        return made[-1]

    reference = Reference(config, outer_optimizer=of_tensors, codec=EXACT)
    before = reference.state.theta.copy()
    [digest] = train(reference, outer_steps=1)
    shapes = [[tuple(tensor.shape) for tensor in optimizer.param_groups[0]["params"]] for optimizer in made]
    parts = [reference.layout.fragment(number) for number in range(len(reference.layout.fragments))]
    assert shapes == [[parameter.shape for parameter in part] for part in parts]
    for part, optimizer in zip(parts, made, strict=True):
        for parameter, tensor in zip(part, optimizer.param_groups[0]["params"], strict=True):
            stepped = before[parameter.slice] - tensor.grad.numpy().ravel()
            assert np.array_equal(reference.state.theta[parameter.slice], stepped)
    assert digest == digest_of_state([reference.state.theta.view(np.uint8).data])


def test_an_optimizer_that_diverges_is_named(small_content: dict[str, Any]) -> None:
    reference = Reference(config_of(small_content), outer_optimizer=partial(torch.optim.SGD, lr=float("inf")))
    with pytest.raises(ArgumentError, match=r"^outer_optimizer: theta .* outer step 0 of fragment 0\. Lower"):
        train(reference, outer_steps=1)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (torch.optim.SGD([torch.zeros(1)], lr=1.0), r"is a SGD that was made already\. Give the class"),
        (lambda tensors: None, r"has made a NoneType\. Make an optimizer of torch\.optim"),
        (torch.optim.LBFGS, r": LBFGS\.step needs a closure"),
        (
            partial(torch.optim.SGD, lr=-1.0),
            r": Invalid learning rate: -1\.0\. Correct the function, or use an optimizer that",
        ),
    ],
)
def test_what_is_no_outer_optimizer_is_named(small_content: dict[str, Any], given: Any, problem: str) -> None:
    with pytest.raises(ArgumentError, match=f"^outer_optimizer ?{problem}"):
        Reference(config_of(small_content), outer_optimizer=given)


# A roster ------------------------------------------------------------------------------------------------------------
def test_what_is_no_roster_is_named(small_content: dict[str, Any]) -> None:
    samples: Any = ((0, 80),)
    with pytest.raises(ArgumentError, match=r"^the samples of Work\('a', …\) are \(\(0, 80\),\)\. Give a tuple of Sam"):
        Work("a", samples, 10)
    with pytest.raises(ArgumentError, match=r"^the outer step's roster is empty\. Give the Work"):
        Reference(config_of(small_content)).outer_step([])


# A codec -------------------------------------------------------------------------------------------------------------
def test_without_a_codec_a_step_of_sgd_is_the_mean_of_what_replicas_made_of_theta(
    small_content: dict[str, Any],
) -> None:
    """As in data-parallel training, to float precision."""
    config = config_of(small_content, outer_optimizer={"learning_rate": 1.0, "momentum": 0.0})
    reference = Reference(config, codec=EXACT)
    theta, locals_ = reference.state.theta.copy(), list[Vector]()
    for number in range(2):
        replica, local = reference.build_replica(), np.empty_like(theta)
        replica.train(theta, 0, (SampleRange(8 * number, 8 * number + 8),), 4)
        replica.store(local)
        locals_.append(local)
    train(reference, outer_steps=1)
    np.testing.assert_allclose(reference.state.theta, (locals_[0] + locals_[1]) / 2, rtol=0, atol=1e-6)


def test_int8_is_as_far_from_it_as_its_levels_are_apart(small_content: dict[str, Any]) -> None:
    config = config_of(small_content, outer_optimizer=PLAIN)
    exact, int8 = Reference(config, codec=EXACT), Reference(config)
    sent: list[Vector] = []

    def note(values: Vector) -> Vector:
        sent.append(values)
        return values

    train(Reference(config, codec=Codec(note, unchanged)), outer_steps=1)
    train(exact, outer_steps=1)
    train(int8, outer_steps=1)
    half_a_level = max(np.abs(values).max() for values in sent) / 254
    bound = (
        0.7 * 1.6 * 2 * half_a_level
    )  # of a contribution, and of the average; through the learning rate and momentum
    difference = np.abs(exact.state.theta - int8.state.theta).max()
    assert 0 < difference <= 1.01 * bound


@pytest.mark.parametrize(("kind", "feedback"), [("int8", 0.0), ("e3m0", 0.7), ("sparse", 0.95)])
def test_a_given_codec_is_used_as_the_runs_own_is(small_content: dict[str, Any], kind: str, feedback: float) -> None:
    """Error feedback included."""
    config = config_of(small_content, codec={"kind": kind, "error_feedback": feedback})
    given = config_of(small_content, codec={"kind": "fp16", "error_feedback": feedback})
    codec = run_codec(kernels.FORMATS[kind], kernels.NEAREST)
    assert train(Reference(given, codec=codec)) == train(Reference(config))


def test_the_average_may_stay_as_it_is(small_content: dict[str, Any]) -> None:
    sizes: list[int] = []

    def encode(values: Vector) -> Vector:
        sizes.append(values.size)
        return values

    for encodes_average, calls in ((True, 3), (False, 2)):
        sizes.clear()
        train(Reference(config_of(small_content), codec=Codec(encode, unchanged, encodes_average)), outer_steps=1)
        assert len(sizes) == calls


def test_a_codec_may_use_its_arrays_again(small_content: dict[str, Any]) -> None:
    room: list[Vector] = []

    def encode(values: Vector) -> Vector:
        values *= 2
        return values

    def decode(values: Vector) -> Vector:
        room[:] = room or [np.empty_like(values)]
        return np.divide(values, 2, out=room[0])

    config = config_of(small_content, codec={"error_feedback": 1.0})
    assert train(Reference(config, codec=Codec(encode, decode))) == train(Reference(config, codec=EXACT))


@pytest.mark.parametrize(
    ("decode", "problem"),
    [
        (lambda values: values[:-1], r"ndarray float32 \(\d+,\)\. Return an ndarray float32 \(\d+,\)"),
        (lambda values: values.reshape(-1, 1), r"ndarray float32 \(\d+, 1\)\. Return an ndarray float32 \(\d+,\)"),
        (lambda values: values.astype(np.float64), r"ndarray float64 \(\d+,\)\. Return an ndarray float32"),
        (torch.from_numpy, r"Tensor torch\.float32 .*Return an ndarray float32"),
        (lambda values: None, r"NoneType\. Return an ndarray float32"),
        (
            lambda values: np.where(np.arange(values.size) == 7, np.float32("nan"), values),
            r"nan for .*, value 7 of \d+",
        ),
        (lambda values: values / np.float32(0), r"inf for .* Return finite values"),
    ],
)
@pytest.mark.filterwarnings("ignore:.* encountered in divide:RuntimeWarning")
def test_what_a_codec_may_not_return(
    small_content: dict[str, Any], decode: Callable[[Vector], Any], problem: str
) -> None:
    with pytest.raises(ArgumentError, match=rf"^codec: decode has returned -?{problem}") as caught:
        train(Reference(config_of(small_content), codec=Codec(unchanged, decode)), outer_steps=1)
    assert caught.value.exit_code == 2


def test_a_codec_is_not_blamed_for_training_that_has_diverged() -> None:
    with pytest.raises(WorkerError, match="a pseudo-gradient holds NaN or infinity"):
        EXACT.round_trip(np.array([1, np.nan], np.float32))


def test_a_tuple_is_no_codec(small_content: dict[str, Any]) -> None:
    given: Any = (unchanged, unchanged)
    with pytest.raises(ArgumentError, match=r"^codec is a tuple\. Give a Codec\(encode, decode\)"):
        Reference(config_of(small_content), codec=given)


# A pattern -----------------------------------------------------------------------------------------------------------
def backwards(layout: Layout) -> Sequence[Sequence[str]]:
    """Three fragments: what comes last in the model is synchronised first."""
    names = [parameter.name for parameter in layout][::-1]
    return [names[:3], names[3:4], names[4:]]


def test_fragments_are_those_of_the_pattern_in_its_order(small_content: dict[str, Any]) -> None:
    taken: list[set[str]] = []

    class Noting(Reference):
        def synchronise(self, fragment: int, members: Sequence[Participant]) -> None:
            before = self.state.theta.copy()
            super().synchronise(fragment, members)
            changed = {each.name for each in self.layout if (before != self.state.theta)[each.slice].any()}
            taken.append(changed)

    reference = Noting(config_of(small_content), pattern=backwards)
    train(reference, outer_steps=2)
    assert taken == [set(names) for names in backwards(reference.layout)] * 2


def test_a_pattern_of_the_runs_own_fragments_gives_the_same_bits(small_content: dict[str, Any]) -> None:
    config = config_of(small_content, streaming={"layers_per_fragment": 1, "pattern": "sequential", "overlap": 1})

    def own(layout: Layout) -> Sequence[Sequence[str]]:
        return [[each.name for each in layout.fragment(number)] for number in range(len(layout.fragments))]

    assert train(Reference(config, pattern=own)) == train(Reference(config))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (lambda names: [names[1:]], r"left out: \S+\. Put each"),
        (lambda names: [names[3:]], r"left out: \S+, and 2 others\. Put each"),
        (lambda names: [names, names[:1]], r"named more than once: \S+\. Put each"),
        (lambda names: [[*names, "lm_head"]], r"there is no parameter: lm_head\. Use names"),
        (lambda names: [names, []], r"empty: fragment 1\. Leave it out"),
    ],
)
def test_a_pattern_has_each_parameter_once(
    small_content: dict[str, Any], changed: Callable[[list[str]], list[list[str]]], problem: str
) -> None:
    with pytest.raises(ArgumentError, match=f"^pattern: {problem}"):
        Reference(config_of(small_content), pattern=lambda layout: changed([each.name for each in layout]))


def test_a_reference_takes_nothing_that_no_run_can_have(small_content: dict[str, Any]) -> None:
    config = config_of(small_content)
    steps = config.training.inner_steps

    def too_many(layout: Layout) -> Sequence[Sequence[str]]:
        names = [parameter.name for parameter in layout]
        return [*([name] for name in names[:steps]), names[steps:]]

    with pytest.raises(ArgumentError, match=rf"^pattern: {steps + 1} fragments .* training\.inner_steps = {steps},"):
        Reference(config, pattern=too_many)
    overlap = config.model_copy(update={"streaming": StreamingSection(overlap=steps)})
    with pytest.raises(ArgumentError, match=rf"^streaming\.overlap = {steps} .* training\.inner_steps = {steps}\."):
        Reference(overlap)


# All three -----------------------------------------------------------------------------------------------------------
def test_a_stream_with_all_three_learns(small_content: dict[str, Any]) -> None:
    config = config_of(small_content, streaming={"overlap": 1}, codec={"error_feedback": 1.0})
    coarse = Codec(lambda values: values.astype(np.float16), lambda half: half.astype(np.float32))
    adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0)
    reference = Reference(config, outer_optimizer=adamw, codec=coarse, pattern=backwards)
    before = reference.held_out_loss()
    train(reference, outer_steps=6)
    assert reference.held_out_loss() < before - 0.5


def test_the_programs_of_the_page_run(
    small_content: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that try an idea, in their order, on a smaller model and text."""
    small = config_of(small_content)
    monkeypatch.setattr(RunConfig, "from_toml", lambda path: small)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # it would stay for the tests after this one
    before, program = Reference(small).held_out_loss(), dict[str, Any]()
    tried = PAGE.read_text(encoding="utf-8").partition("\n## Trying an idea\n")[2]
    for block in re.findall(r"^```python\n(.*?)^```$", tried, re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), program)
    losses = {
        what: float(loss) for what, loss in re.findall(r"^(.+): ([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    }
    assert losses.keys() >= {"the run's own", "sign momentum", "signs", "by kind", "all three"}
    assert not {what: loss for what, loss in losses.items() if not loss < before}
