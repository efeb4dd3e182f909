"""A run as `diloco-peer runs` lists it: whether one can join, what it takes of a machine, and who is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from opendiloco.config.run_config import RunConfig
from opendiloco.data.own_files import NONE
from opendiloco.errors import fit_for_terminal
from opendiloco.quantities import in_words
from opendiloco.run import Run
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.values.wire import printable

if TYPE_CHECKING:
    from opendiloco.workers.needs import Needs

NO_TRAINERS = frozenset({PeerState.LEAVING, PeerState.ARCHIVING})


@dataclass(frozen=True)
class Taken:
    """What a run takes of one machine, in bytes: of one with a GPU, and of one that trains on its CPU."""

    parameters: int
    gpu_memory: int
    main_memory: int
    main_memory_on_cpu: int
    disk: int
    traffic_each_way: int
    """In each outer step."""

    @classmethod
    def of(cls, needs: Needs) -> Taken:
        """Return what a machine with one GPU, or none, has to have."""
        return cls(
            parameters=needs.host.values,
            gpu_memory=needs.device_memory,
            main_memory=needs.main_memory,
            main_memory_on_cpu=needs.main_memory_on_cpu,
            disk=needs.disk,
            traffic_each_way=2 * needs.payload,
        )


@dataclass(frozen=True)
class ListedRun:
    """One run. `problem` says why this machine cannot know more of it, or what it takes; empty: it knows all."""

    run_id: str
    problem: str = ""
    run: Run | None = None
    heartbeats: Sequence[Heartbeat] = ()
    taken: Taken | None = None

    @property
    def trainers(self) -> list[Heartbeat]:
        """Return the heartbeats of the peers that train."""
        return [beat for beat in self.heartbeats if beat.state not in NO_TRAINERS]

    @property
    def outer_step(self) -> int:
        """Return how far the run has come, as far as its peers say; 0 while nobody is there."""
        return max((beat.index for beat in self.heartbeats), default=0)

    @property
    def is_finished(self) -> bool:
        return self.run is not None and 0 < self.run.config.total_outer_steps <= self.outer_step

    def plain(self) -> dict[str, Any]:
        """Return the run as JSON can say it."""
        if self.run is None:
            return {"run": self.run_id, "problem": self.problem}
        config = self.run.config
        return {
            "run": self.run_id,
            "problem": self.problem or None,
            "organiser": self.run.manifest.organiser,
            "peers": [beat.peer for beat in self.trainers],
            "minimum_peers": config.rounds.minimum_peers,
            "outer_step": self.outer_step,
            "outer_steps": config.total_outer_steps,
            "finished": self.is_finished,
            "tokens_per_second": round(sum(beat.tokens_per_second for beat in self.trainers), 1),
            "model": model_of(config),
            "sources": [source.source for source in config.data.all_sources],
            "needs": None if self.taken is None else asdict(self.taken),
        }

    def lines(self) -> Iterator[str]:
        """Yield the run's lines for people."""
        yield from map(fit_for_terminal, self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield them with a stranger's words as they are."""
        yield self.run_id
        if self.run is None:
            yield f"  {self.problem}"
            return
        config, taken = self.run.config, self.taken
        state = "finished" if self.is_finished else f"outer step {self.outer_step}/{config.total_outer_steps}"
        here = len(self.trainers)
        least = f" of at least {config.rounds.minimum_peers}" if here < config.rounds.minimum_peers else ""
        speed = sum(beat.tokens_per_second for beat in self.trainers)
        yield f"  {state} · {here}{least} peers · {speed:,.0f} tokens/s"
        sources = printable(", ".join(source.source for source in config.data.all_sources))
        parameters = "" if taken is None else f", {taken.parameters:,} parameters"
        yield f"  {printable(model_of(config))}{parameters} · data: {sources}"
        if self.problem:
            yield f"  {self.problem}"
        if taken is not None:
            yield (
                f"  takes {in_words(taken.gpu_memory)} of a GPU and activations, or the CPU with "
                f"{in_words(taken.main_memory_on_cpu)} of memory; {in_words(taken.disk)} of disk; "
                f"{in_words(taken.traffic_each_way)} each way in an outer step"
            )


def model_of(config: RunConfig) -> str:
    """Return what kind of model a run trains, or where it comes from."""
    return config.model.path or str((config.model.config or {}).get("model_type", "unknown model"))


def taken_by(run: Run) -> Taken:
    """Return what a run takes of a machine. Imports torch.

    Raises: DataError for a model that each volunteer names; ManifestError for one that cannot be built.
    """
    from opendiloco.model.build import sized_skeleton
    from opendiloco.workers.needs import needs_of

    config = run.with_own(NONE).config
    return Taken.of(needs_of(config, sized_skeleton(config)))
