"""DiLoCo in one process, with the swarm's codec: Algorithm 2 of arXiv 2501.18512 (Streaming DiLoCo) as a loop over
replicas. With one fragment and no overlap, the same code is Algorithm 1 (DiLoCo, arXiv 2311.08105).

With the same leases, a swarm must agree with it bit for bit. It is also the place to try an idea: an outer optimizer, a
codec and a pattern of fragments can be given in Python (docs/library.md).

A cycle, or outer step, is H inner steps of each replica, in which each fragment is synchronised once. The paper leaves
some points open; here they are:

- Fragments are spread evenly over a cycle. `FragmentSchedule` defines the inner step at which each is synchronised and
  merged.
- A pseudo-gradient counts from the theta after the fragment's last outer step (line 15).
- Averages are weighted by the tokens of the cycle's leases. In an asynchronous run old leases count less (`aged`).
- A replica that did not take part in the previous cycle begins with theta, and has nothing left to merge.
- A replica with no more inner steps than its overlap merges a fragment before that is synchronised again.
- A slow replica's inner steps may take several of the others' cycles. Each of its fragments then joins the fragment's
  first outer step after it is stored. If it has missed an outer step before, it waits for nothing, and merges the theta
  at the time of the store.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from opendiloco import kernels
from opendiloco.config.overrides import NO_OVERRIDES, Overrides, mixture_phases
from opendiloco.config.run_config import RunConfig, StreamingSection
from opendiloco.data.tokenizer import Tokenizer, build_tokenizer
from opendiloco.data.training_data import TrainingData, load_data
from opendiloco.errors import ArgumentError, WorkerError, first_line
from opendiloco.model.build import build_model
from opendiloco.model.layout import Layout
from opendiloco.model.parameters import layout_of
from opendiloco.shared_memory import Vector
from opendiloco.training.codec import RunRounding, share_made_up_for
from opendiloco.training.evaluation import EVALUATED_AT_ONCE, held_out_loss
from opendiloco.training.inner import ModelReplica
from opendiloco.training.outer import OuterState
from opendiloco.training.streaming import FragmentSchedule
from opendiloco.training.team import Team
from peers.protocol.weights import aged
from peers.values.chunks import digest_of_state
from peers.values.leases import SampleRange
from peers.values.manifest import LoggedAmendment

CPU = torch.device("cpu")
OuterOptimizer: TypeAlias = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
"""An optimizer's class, or a function that makes one. It is called once for each fragment, with theta's tensors in the
model's shapes. `step` finds the averaged pseudo-gradients in the tensors' gradients."""
Pattern: TypeAlias = Callable[[Layout], Sequence[Sequence[str]]]
"""A function from the model's layout to fragments, each a list of parameter names. Fragments are synchronised in this
order within a cycle."""


# The algorithm --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Work:
    """One replica's part in one outer step. `overlap` is in inner steps (τ in the paper's section 3.3.2); None: the
    run's overlap.

    `age` is the number of outer steps taken since the replica began. `fragments` are the ones that it contributes
    (None: all). Work that takes several outer steps is in the roster of each to which it contributes fragments.
    `formats` are the formats of the fragments' contributions, as numbers in the manifest's `codec.contributions`; if
    empty, all have the run's format.
    """

    replica: str
    samples: tuple[SampleRange, ...]
    steps: int
    overlap: int | None = None
    age: int = 0
    fragments: tuple[int, ...] | None = None
    formats: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        is_sequence = isinstance(self.samples, (tuple, list))
        if not (is_sequence and all(isinstance(samples, SampleRange) for samples in self.samples)):
            raise ArgumentError(
                f"the samples of Work({self.replica!r}, …) are {self.samples!r}.",
                "Give a tuple of SampleRanges, such as a lease of SamplePool.deal.",
            )

    def format(self, fragment: int) -> int:
        """Return the number of the format in which the replica's contribution to a fragment is encoded."""
        return self.formats[fragment] if self.formats else 0

    def contributes_to(self, fragment: int) -> bool:
        """Return True if the number `fragment` is in `fragments`, or if `fragments` is None."""
        return self.fragments is None or fragment in self.fragments


class Participant:
    """A replica, with the state that it keeps from one cycle to the next."""

    work: Work

    def __init__(self, replica: ModelReplica, streaming: StreamingSection) -> None:
        self.replica = replica
        self.cycles = FragmentSchedule(replica.store, replica.merge, len(replica.layout.fragments), streaming)
        self.residual: Vector = np.zeros(replica.layout.size, np.float32)
        """The errors of payloads, for error feedback."""
        self.shares: dict[int, float] = {}
        """By fragment, the share of the error that the next payload adds again."""
        self.base = self.residual.copy()
        """The theta from which each fragment's pseudo-gradient counts."""
        self.returned = self.base.copy()
        """The theta of each fragment to merge."""
        self.began_at = -1
        """The outer step for which the replica trains, or -1."""
        self._ended_at: int | None = None
        self._streams = len(replica.layout.fragments) > 1 or not streaming.is_plain

    def take_part(
        self, work: Work, theta: Vector, tokens: int, overrides: Overrides, index: int, overlap: int, config: RunConfig
    ) -> None:
        """Begin to train the lease of `work`, or continue it. A replica that was not in the previous cycle begins from
        `theta`.

        `tokens` is the number that the run has trained before the outer step in which the work begins, and `overrides`
        apply there.
        """
        self.work, began_at = work, index - work.age
        if began_at == self.began_at:
            return
        self.began_at = began_at
        was_there = self._ended_at is not None and began_at == self._ended_at + 1
        goes_on = was_there and self._streams
        if not was_there:
            self.residual[:] = 0
        if not goes_on:
            self.base[:] = theta
        begin_with = None if goes_on else theta
        steps = self._inner_steps = self.replica.inner_steps(
            begin_with, began_at, work.samples, work.steps, tokens, overrides=overrides
        )
        is_last = began_at + 1 == overrides.total_outer_steps(config)
        self.cycles.begin(steps.planned, steps.every(), overlap, goes_on, is_last)

    def train_until_stored(self, fragment: int) -> None:
        """Take the inner steps until `fragment` must be stored for averaging."""
        assert self.cycles.train_up_to(fragment, self.returned), "there are fewer inner steps than planned"

    def receive_theta(self, part: slice, theta: Vector) -> None:
        """Set a fragment's new theta, which the replica merges and from which its next pseudo-gradient is computed."""
        self.base[part] = self.returned[part] = theta

    def end(self, index: int) -> None:
        """Take the remaining inner steps of the present lease, and record that its work ends in outer step `index`."""
        assert self.cycles.train_to_the_end(self.returned), "there are fewer inner steps than planned"
        self.cycles.merge_what_is_due(self.returned)
        self._ended_at = index

    @property
    def tokens(self) -> int:
        """The number of tokens in the inner steps that are planned for the participant's present lease."""
        return self._inner_steps.planned_tokens


class StreamingDiLoCo:
    """Runs Streaming DiLoCo with replicas in this process. `new_replica` makes a replica when its name first appears in
    a roster."""

    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        theta: Vector,
        new_replica: Callable[[], ModelReplica],
        outer_optimizer: OuterOptimizer | None = None,
        codec: Codec | None = None,
    ) -> None:
        """Create a run at its start. `theta`, which outer steps change in place, must have zeros in the layout's
        padding.

        A given outer optimizer replaces `config.outer_optimizer` and amendments. A given codec replaces `config.codec`
        except for its error feedback.
        """
        self.config = config
        self.layout = layout
        self.state = OuterState(theta, config.outer_optimizer, layout.fragments)
        self.members: dict[str, Participant] = {}
        self._rounding = RunRounding(config.codec)
        self._beginnings = deque[tuple[Vector, int, Overrides]](maxlen=1 + config.rounds.staleness)
        """Theta, the run's tokens and the overrides at the beginning of the last outer steps."""
        self.index = 0
        self.tokens = 0
        self.overrides: Overrides = NO_OVERRIDES
        """The overrides from the next outer step on."""
        self._new_replica = new_replica
        self._codec = codec
        self._optimizers: list[tuple[list[torch.nn.Parameter], torch.optim.Optimizer]] = []
        """By fragment, theta's tensors and their optimizer, if one was given."""
        if outer_optimizer is not None:
            for fragment in range(len(layout.fragments)):
                tensors = [torch.nn.Parameter(tensor) for tensor in self._tensors(theta, fragment)]
                self._optimizers.append((tensors, _made_by(outer_optimizer, tensors)))

    def outer_step(self, roster: Sequence[Work]) -> bytes:
        """Take one outer step with the work of a roster. Return the state digest, which depends on the roster's order.

        Raises: ArgumentError for an empty roster; IndexError for work older than `rounds.staleness` outer steps.
        """
        members = self.begin(roster)
        for fragment, part in enumerate(self.state.fragments):
            present = [member for member in members if member.work.contributes_to(fragment)]
            before = self.state.theta[part].copy()
            for member in present:
                member.train_until_stored(fragment)
            if present:
                self.synchronise(fragment, present)
            # A member of age > 0 began to train in an earlier outer step and does not wait for the end of this outer
            # step, so it gets the theta from before this outer step.
            for member in present:
                member.receive_theta(part, before if member.work.age else self.state.theta[part])
        return self.end(present)

    def begin(self, roster: Sequence[Work]) -> list[Participant]:
        """Begin an outer step. Return the roster's participants. Raises: ArgumentError for an empty roster; IndexError
        for work older than `rounds.staleness` outer steps."""
        if not roster:
            raise ArgumentError("the outer step's roster is empty.", "Give the Work of one replica or more.")
        self._beginnings.append((self.state.theta.copy(), self.tokens, self.overrides))
        streaming, members = self.config.streaming, []
        for work in roster:
            if work.replica not in self.members:
                self.members[work.replica] = Participant(self._new_replica(), streaming)
            members.append(self.members[work.replica])
            overlap = streaming.overlap if work.overlap is None else work.overlap
            members[-1].take_part(work, *self._beginnings[-1 - work.age], self.index, overlap, self.config)
        return members

    def end(self, members: Sequence[Participant]) -> bytes:
        """End an outer step and the work of `members`, which contribute to its last fragment. Return the digest
        of theta and m, or of theta alone if `__init__` was given an outer optimizer, which does not use m."""
        for member in members:
            member.end(self.index)
        self.index += 1
        self.tokens += sum(member.tokens for member in members)
        return digest_of_state([self.state.theta.view(np.uint8).data]) if self._optimizers else self.state.digest()

    def synchronise(self, fragment: int, members: Sequence[Participant]) -> None:
        """Average the members' pseudo-gradients of a fragment, after encoding, and take the fragment's outer step."""
        part = self.state.fragments[fragment]
        codec = self._codec_with(self._rounding.of_average(self.index, fragment))
        sent = [self._contribution(fragment, member) for member in members]
        average = self.mean(fragment, members, sent)
        if codec.encodes_average:
            average = codec.round_trip(average)
            for member, values in zip(members, sent, strict=True) if codec.is_sparse else ():
                member.residual[part] += np.where(average == 0, values, np.float32(0))
        self._take_outer_step(fragment, average)

    def _contribution(self, fragment: int, member: Participant) -> Vector:
        """Return a member's pseudo-gradient of a fragment, with error feedback, as other members decode it."""
        part, format = self.state.fragments[fragment], member.work.format(fragment)
        local = np.empty_like(self.state.theta)
        member.cycles.store(local, fragment)
        difference = member.base[part] - local[part]
        if share := member.shares.get(fragment):
            difference += np.float32(share) * member.residual[part]
        member.shares[fragment] = share_made_up_for(self.config.codec, format)
        rounding = self._rounding.of_contribution(member.began_at, fragment, member.work.samples, format)
        sent = self._codec_with(rounding, format).round_trip(difference)
        member.residual[part] = difference - sent
        return sent

    def mean(self, fragment: int, members: Sequence[Participant], sent: Sequence[Vector]) -> Vector:
        """Return the mean of the members' contributions `sent` to a fragment, weighted by trained tokens."""
        weights, total = [self._weight(member) for member in members], np.zeros_like(sent[0])
        for weight, values in zip(weights, sent, strict=True):
            total += np.float32(weight) * values
        total /= np.float32(sum(weights))
        return total

    def _take_outer_step(self, fragment: int, average: Vector) -> None:
        """Take a fragment's outer step with its average. Use the outer optimizer given to `__init__`, or else the rule
        of `OuterState.apply`."""
        part = self.state.fragments[fragment]
        theta, momentum = self.state.theta[part], self.state.momentum[part]
        if self._optimizers:
            self._take_given_step(fragment, average)
            return
        coefficient, every = self.state.coefficient(self.overrides), self.config.outer_optimizer.momentum_every
        rate = np.float32(self.state.learning_rate(self.index, self.overrides) / every)
        if (self.index + 1) % every == 0:
            momentum[:] = np.float32(coefficient) * momentum + average
            theta -= rate * (average + np.float32(coefficient) * momentum)
        else:
            theta -= rate * average
            if coefficient:
                momentum += np.float32(1 / coefficient) * average

    def _take_given_step(self, fragment: int, average: Vector) -> None:
        """Take a fragment's outer step with the outer optimizer given to `__init__`. Raises: ArgumentError if theta is
        no longer finite."""
        part, (tensors, optimizer) = self.state.fragments[fragment], self._optimizers[fragment]
        gradient = np.zeros_like(self.state.theta)
        gradient[part] = average
        for tensor, own in zip(tensors, self._tensors(gradient, fragment), strict=True):
            tensor.grad = own
        optimizer.step()
        if not np.isfinite(self.state.theta[part]).all():
            raise ArgumentError(
                f"outer_optimizer: theta holds NaN or infinity after outer step {self.index} of fragment {fragment}.",
                "Lower its learning rate.",
            )

    def _tensors(self, flat: Vector, fragment: int) -> list[torch.Tensor]:
        parameters = self.layout.fragment(fragment)
        return [torch.from_numpy(flat[each.slice]).view(each.shape) for each in parameters]

    def _codec_with(self, rounding: kernels.Rounding, format: int = 0) -> Codec:
        return self._codec or run_codec(kernels.FORMATS[self.config.codec.contributions[format]], rounding)

    def _weight(self, member: Participant) -> float:
        is_asynchronous = self.config.rounds.enough is not None
        return aged(member.tokens, member.work.age) if is_asynchronous else member.tokens

    def run(self, outer_steps: Sequence[Sequence[Work]]) -> Iterator[bytes]:
        """Take an outer step for each roster in `outer_steps`, and yield the state digest after each."""
        yield from map(self.outer_step, outer_steps)


class Reference(StreamingDiLoCo):
    """A DiLoCo run with all its replicas in this process. Each replica has its own inner optimizer."""

    def __init__(
        self,
        config: RunConfig,
        *,
        outer_optimizer: OuterOptimizer | None = None,
        codec: Codec | None = None,
        pattern: Pattern | None = None,
        device: torch.device = CPU,
    ) -> None:
        """Create the run, with its model and data. `outer_optimizer` and `codec` are as in `StreamingDiLoCo`.

        The fragments are the run's unless a pattern is given. All replicas train on `device`. A swarm's bits are the
        CPU's.

        Raises: ArgumentError for an argument that cannot be used; ManifestError; DataError.
        """
        _check_arguments(config, codec)
        self._tokenizer: Tokenizer = build_tokenizer(config.tokenizer)
        self._data: TrainingData = load_data(config, self._tokenizer)
        model = build_model(config, self._tokenizer).to(device)
        layout = layout_of(model, config.streaming)
        if pattern is not None:
            layout = cut(layout, pattern)
            fragments, steps = len(layout.fragments), config.training.inner_steps
            if fragments > steps:
                raise ArgumentError(
                    f"pattern: {fragments} fragments are more than training.inner_steps = {steps}, but each needs an "
                    "inner step of its own.",
                    "Return fewer fragments, or raise training.inner_steps.",
                )
        self._judge = ModelReplica(config, model, self._data.samples, Team(device), layout=layout)
        theta: Vector = np.zeros(layout.size, np.float32)
        self._judge.store(theta)
        super().__init__(config, layout, theta, self.build_replica, outer_optimizer, codec)

    @property
    def _team(self) -> Team:
        return Team(next(self._judge.model.parameters()).device)

    def amend(self, amendments: Sequence[LoggedAmendment]) -> None:
        """Apply the log's amendments so far: the settings of the last one, and the data mixtures of all."""
        self.overrides = Overrides.of(amendments[-1].amendment if amendments else None, self.config)
        self._data.samples.mix(mixture_phases(amendments, self.config))

    def held_out_loss(self) -> float:
        """Return the loss of theta in nats per token, on the windows on which peers of a swarm evaluate."""
        self._judge.load(self.state.theta)
        model, windows, precision = self._judge.model, self.config.evaluation.windows, self._judge.precision
        at_once = min(self.config.training.batch_size, EVALUATED_AT_ONCE)
        return held_out_loss(model, self._data.held_out, windows, at_once, precision, self._team)[0]

    def build_replica(self) -> ModelReplica:
        """Return a replica with the run's initial weights and its own inner optimizer."""
        model = build_model(self.config, self._tokenizer).to(self._team.device)
        return ModelReplica(self.config, model, self._data.samples, self._team, layout=self.layout)


# Arguments -----------------------------------------------------------------------------------------------------------
class Codec(NamedTuple):
    """A codec: `encode` turns a float32 array into any object, and `decode` turns this object into an array of the same
    shape. If `encodes_average`, averages are encoded, too. If `is_sparse`, averages have zeros for values left out.

    Runs of peers encode averages. With a sparse codec and error feedback, members add to their errors what they sent of
    the values that an average leaves out.
    """

    encode: Callable[[Vector], Any]
    decode: Callable[[Any], Vector]
    encodes_average: bool = True
    is_sparse: bool = False

    def round_trip(self, values: Vector) -> Vector:
        """Return the values after encoding and decoding.

        Raises: WorkerError when they are not finite; ArgumentError when the codec returns another shape or type, or
        values that are not finite.
        """
        if not np.isfinite(values).all():
            raise WorkerError(
                "a pseudo-gradient holds NaN or infinity.", "Training has diverged: lower learning rates."
            )
        decoded: Any = self.decode(self.encode(values.copy()))  # copies, because encode may change its argument
        if not isinstance(decoded, np.ndarray) or (decoded.dtype, decoded.shape) != (values.dtype, values.shape):
            kind = f"{type(decoded).__name__} {getattr(decoded, 'dtype', '')} {getattr(decoded, 'shape', '')}".rstrip()
            raise ArgumentError(
                f"codec: decode has returned {kind}.", f"Return an ndarray float32 {values.shape}, as encode was given."
            )
        if not np.isfinite(decoded).all():
            place = int(np.argmin(np.isfinite(decoded)))
            raise ArgumentError(
                f"codec: decode has returned {decoded[place]} for {values[place]:g}, value {place} of {values.size}.",
                "Return finite values, also for an array of zeros, and for one with a few that are far larger.",
            )
        return decoded.copy()


def run_codec(format: kernels.Format, rounding: kernels.Rounding) -> Codec:
    """Return the codec that encodes values like a run's payloads, in this format and with this rounding."""

    def encode(values: Vector) -> kernels.Payload:
        payload = kernels.Payload(format, values.size)
        kernels.quantize(values, payload, rounding)
        return payload

    def decode(payload: kernels.Payload) -> Vector:
        values = np.empty(payload.values, np.float32)
        kernels.dequantize(payload, values)
        return values

    return Codec(encode, decode, is_sparse=format is kernels.SPARSE)


def _check_arguments(config: RunConfig, codec: object) -> None:
    """Raise ArgumentError unless the overlap is less than the number of inner steps, and `codec` is a Codec or None."""
    overlap, steps = config.streaming.overlap, config.training.inner_steps
    if overlap >= steps:
        raise ArgumentError(
            f"streaming.overlap = {overlap} is not less than training.inner_steps = {steps}.",
            "Lower the first or raise the second.",
        )
    if codec is not None and not isinstance(codec, Codec):
        raise ArgumentError(f"codec is a {type(codec).__name__}.", "Give a Codec(encode, decode).")


def _made_by(outer_optimizer: OuterOptimizer, tensors: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that `outer_optimizer` makes for a fragment's tensors. Raises: ArgumentError unless it is a
    torch optimizer that steps without a closure."""
    if not callable(outer_optimizer):
        raise ArgumentError(
            f"outer_optimizer is a {type(outer_optimizer).__name__} that was made already.",
            "Give the class, or a function that makes an optimizer from a list of parameters.",
        )
    try:
        optimizer: Any = outer_optimizer(tensors)
    except ValueError as error:
        raise ArgumentError(
            f"outer_optimizer: {first_line(error)}",
            "Correct the function, or use an optimizer that suits all tensors of the model.",
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"outer_optimizer has made a {type(optimizer).__name__}.", "Make an optimizer of torch.optim."
        )
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ArgumentError(
            f"outer_optimizer: {type(optimizer).__name__}.step needs a closure, but an outer step has no loss.",
            "Use an optimizer that needs gradients only.",
        )
    return optimizer


def cut(layout: Layout, pattern: Pattern) -> Layout:
    """Return a layout with the same parameters, divided into the fragments that `pattern` returns.

    Raises: ArgumentError unless each parameter is in one fragment, and no fragment is empty.
    """
    fragments = [list(names) for names in pattern(layout)]
    known, given = [parameter.name for parameter in layout], Counter(name for names in fragments for name in names)
    empty = [f"fragment {number}" for number, names in enumerate(fragments) if not names]
    for mistake, wrong, remedy in (
        ("there is no parameter", [name for name in given if name not in known], "Use names that the layout has."),
        ("left out", [name for name in known if name not in given], "Put each parameter into a fragment."),
        ("named more than once", [name for name in given if given[name] > 1], "Put each into one fragment only."),
        ("empty", empty, "Leave it out."),
    ):
        if wrong:
            others = f", and {len(wrong) - 1} others" if wrong[1:] else ""
            raise ArgumentError(f"pattern: {mistake}: {wrong[0]}{others}.", remedy)
    number_of = {name: number for number, names in enumerate(fragments) for name in names}
    return Layout([(each.name, each.shape) for each in layout], [number_of[name] for name in known])
