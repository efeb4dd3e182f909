"""The view of a run at one moment: what its peers' heartbeats and its log say together, the same for all that show it.

Heartbeats are signed, but what they claim may be false. So numbers are brought into bounds, and less than half of the
peers cannot decide how far the run has come.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from opendiloco.config.run_config import RunConfig
from opendiloco.evaluation_turns import bits_per_byte
from opendiloco.quantities import counted
from opendiloco.run import Run
from opendiloco.view.amended import Amended, outer_steps_in_force
from opendiloco.view.chronicle import Chronicle
from peers.network.contacts import host_of, is_numeric, is_public
from peers.network.sockets import parse_endpoint
from peers.presence.heartbeat import NAMED_PEERS, Heartbeat, HeldOutLoss, PeerState
from peers.presence.membership import PARTICIPATING
from peers.values.signed_heads import SignedHeads

if TYPE_CHECKING:
    from rich.table import Table


FINISHED = "finished"
OPEN, BEHIND_NAT, UNKNOWN = "open", "NAT", "-"
LARGEST_LOSS = 100.0  # others may claim any
LARGEST_RATE = 1e12  # tokens a second, far more than any machine has; the sum of all rates has to stay finite
LARGEST_STEP = 2**50  # that a page can count to: an organiser may say that a run has any number of outer steps


# One peer ---------------------------------------------------------------------------------------------------------
def _shown_state(beat: Heartbeat, config: RunConfig) -> str:
    """Return what a peer is doing, in one word."""
    return FINISHED if is_finished(beat, config) else str(beat.state)


def is_finished(beat: Heartbeat, config: RunConfig) -> bool:
    """Return whether the peer has been through the whole run, and is there to hand out its result."""
    return beat.state is PeerState.TRAINING and beat.index >= outer_steps_in_force(config, beat.amendment)


def holders(beats: Iterable[Heartbeat], step: int) -> str:
    """Return how many archives and volunteers have an outer step, in words; empty: none."""
    states = [beat.state for beat in beats if beat.index >= step]
    archives, volunteers = states.count(PeerState.ARCHIVING), sum(state in PARTICIPATING for state in states)
    said = [counted(archives, "archive")] * bool(archives) + [counted(volunteers, "other volunteer")] * bool(volunteers)
    return " and ".join(said)


def reachability(beat: Heartbeat) -> str:
    """Return whether others can dial a peer: "open"; "NAT" where only nodes that introduce it can be; "-": unknown."""
    hosts = [parse_endpoint(endpoint)[0] for endpoint in beat.endpoints]
    if any(map(_is_on_the_internet, hosts)) or (
        hosts and not any(_is_on_the_internet(host_of(relay)) for relay in beat.relays)
    ):
        return OPEN
    return BEHIND_NAT if beat.relays else UNKNOWN


def _is_on_the_internet(host: str | None) -> bool:
    """Return whether it is a public address, or a name: nobody else has one."""
    return host is not None and (is_public(host) or not is_numeric(host))


def plain_peer(beat: Heartbeat, config: RunConfig) -> dict[str, object]:
    """Return what a peer says of itself as JSON can say it, in the words that all surfaces share."""
    return {
        "peer": beat.peer,
        "name": beat.name,
        "state": _shown_state(beat, config),
        "outer_step": beat.index,
        "inner_step": beat.inner_step,
        "tokens_per_second": beat.tokens_per_second,
        "loss": beat.loss,
        "reach": reachability(beat),
        "trouble": beat.trouble,
    }


def _bounded(beat: Heartbeat, last_step: int) -> Heartbeat:
    """Return the same heartbeat with numbers that can be added up and drawn, in a run of so many outer steps."""
    return beat.model_copy(
        update={
            "index": min(beat.index, last_step),
            "tokens_per_second": min(beat.tokens_per_second, LARGEST_RATE),
            "loss": None if beat.loss is None else bounded_loss(beat.loss),
        }
    )


def bounded_loss(loss: float) -> float:
    """Return the loss, or the largest that is believed, of either sign."""
    return max(-LARGEST_LOSS, min(loss, LARGEST_LOSS))


# Whether peers agree ----------------------------------------------------------------------------------------------
class Agreement:
    """The digests that peers have named, by place in the log. Two peers at one place must name the same, whenever they
    were there."""

    def __init__(self) -> None:
        self._said: dict[int, dict[tuple[bytes, bytes], set[str]]] = defaultdict(lambda: defaultdict(set))

    def observe(self, heartbeats: Iterable[Heartbeat]) -> None:
        """Take in heartbeats."""
        for beat in heartbeats:
            if beat.state is not PeerState.ARCHIVING:  # it has no state to compare
                self._said[beat.index][beat.head, beat.state_digest].add(beat.peer)

    @property
    def compared(self) -> int:
        """Return the number of places in the log at which more than one peer has been seen."""
        return sum(len(set().union(*groups.values())) > 1 for groups in self._said.values())

    @property
    def disagreements(self) -> tuple[int, ...]:
        """Return the places at which different digests were named."""
        return tuple(sorted(index for index, groups in self._said.items() if len(groups) > 1))

    @property
    def minorities(self) -> set[str]:
        """Return the peers that name other digests than most others at their place: of two peers, both."""
        found = set[str]()
        for index in self.disagreements:
            most, second, *others = sorted(self._said[index].values(), key=len, reverse=True)
            found |= second.union(*others, most if len(most) == len(second) else ())
        return found

    @property
    def verdict(self) -> bool | None:
        """Return whether the peers agree; None: no two of them have been seen at one place."""
        if self.disagreements:
            return False
        return True if self.compared else None

    def __str__(self) -> str:
        if self.disagreements:
            places = ", ".join(str(index) for index in self.disagreements)
            return f"the peers DISAGREE at outer step {places}: their log or state digests differ"
        if not self.compared:
            return "no two peers have been seen at the same outer step yet: nothing to compare"
        plural = "s" if self.compared > 1 else ""
        return f"all log and state digests agree ({self.compared} outer step{plural} compared)"


# The run ----------------------------------------------------------------------------------------------------------
class RunView:
    """A run at one moment.

    `peers` are those that have not said goodbye, in the order in which they came, with numbers in bounds. `chronicle`
    is the log as far as it was read here, None without one; `step_before` the outer step that was seen before.
    `agreement` remembers what peers have said before.
    """

    def __init__(
        self,
        run: Run,
        heartbeats: Iterable[Heartbeat] = (),
        agreement: Agreement | None = None,
        chronicle: Chronicle | None = None,
        step_before: int = 0,
    ) -> None:
        beats = [beat for beat in heartbeats if beat.state is not PeerState.LEAVING]
        self.run = run
        self.amended = Amended.seen_in(run, beats, chronicle)
        """The amendments in force: by the log where there is one, by what peers say elsewhere."""
        last = min(self.outer_steps, LARGEST_STEP)
        self.peers = tuple(_bounded(beat, last) for beat in beats)
        self.agreement = agreement or Agreement()
        self.agreement.observe(beats)
        self.chronicle = chronicle
        self._step_before = step_before

    @cached_property
    def trainers(self) -> tuple[Heartbeat, ...]:
        """Return all peers but archives."""
        return tuple(beat for beat in self.peers if beat.state is not PeerState.ARCHIVING)

    @cached_property
    def working(self) -> tuple[Heartbeat, ...]:
        """Return the peers that hold the run's state and work on the next entry."""
        return tuple(beat for beat in self.peers if beat.state in PARTICIPATING)

    @cached_property
    def outer_step(self) -> int:
        """Return the outer steps that half of the peers have taken; if none is at work, the most that are known."""
        if self.working:
            return statistics.median_low(beat.index for beat in self.working)
        archived = [beat.index for beat in self.peers if beat.state is PeerState.ARCHIVING]
        return max([self._step_before, self.chronicle.next_index if self.chronicle else 0, *archived])

    @property
    def outer_steps(self) -> int:
        """Return the outer steps of the whole run."""
        return outer_steps_in_force(self.run.config, self.amended.in_force)

    @property
    def is_finished(self) -> bool:
        """Return whether the run has taken its last outer step."""
        return 0 < self.outer_steps <= self.outer_step

    @property
    def tokens_per_second(self) -> float:
        """Return the speed of all peers together."""
        return sum(beat.tokens_per_second for beat in self.trainers)

    @property
    def lineage_tokens(self) -> int:
        """Return the tokens that were trained in the run until now."""
        logged = self.chronicle.records[-1].lineage_tokens if self.chronicle and self.chronicle.records else 0
        return max(logged, statistics.median_low(beat.lineage_tokens for beat in self.working) if self.working else 0)

    @property
    def held_out(self) -> list[HeldOutLoss]:
        """Return what peers last found of theta on held-out text, the newest last. Only losses count that were due by
        now, so that peers cannot claim more of them than the run is long."""
        every = self.run.config.evaluation.every
        said = [beat.held_out for beat in self.peers if beat.held_out is not None]
        due = [one for one in said if every and one.index % every == 0 and one.index <= self.outer_step]
        return sorted(due, key=lambda held_out: held_out.index)

    @property
    def model(self) -> str:
        """Return what kind of model the run trains, or where the organiser says that it comes from."""
        model = self.run.manifest.values["model"]  # in a stranger's words, which may leave defaults out
        return model.get("path") or str((model.get("config") or {}).get("model_type", "unknown model"))

    @property
    def sources(self) -> list[str]:
        """Return where the run's text comes from."""
        return [source.source for source in self.run.config.data.all_sources]


# On a terminal --------------------------------------------------------------------------------------------------------
COLUMNS = ("peer", "state", "inner step", "tokens/s", "loss", "outer step", "log digest", "reach")
HEADINGS = ("peer", "state", "inner", "tokens/s", "loss", "outer", "digest", "reach")
"""The same in the table, which has to fit 80 columns."""
NUMBERS = {"inner", "tokens/s", "loss", "outer"}
STYLES = {
    PeerState.TRAINING: "green",
    PeerState.READY: "cyan",
    PeerState.AVERAGING: "magenta",
    PeerState.LEAVING: "red",
}
LARGEST_EXPONENT = 100.0  # others may claim any loss


@dataclass(frozen=True)
class PeerRow:
    """What the table says of one peer; `cells` may be fewer than the columns."""

    name: str
    cells: tuple[str, ...]
    style: str = "dim"


def _short_name(peer: str) -> str:
    """Return the end of a peer id; its beginning is the same for all."""
    return f"…{peer[-8:]}"


def row_of(beat: Heartbeat, config: RunConfig, name: str | None = None) -> PeerRow:
    """Return a peer's row from its heartbeat."""
    cells = (
        _shown_state(beat, config),
        f"{beat.inner_step}/{config.training.inner_steps}",
        f"{beat.tokens_per_second:,.0f}",
        "-" if beat.loss is None else f"{beat.loss:.3f}",
        f"{beat.index}/{outer_steps_in_force(config, beat.amendment)}",
        beat.head.hex()[:8],
        reachability(beat),
    )
    nickname = f"{beat.name[:7]}…{beat.peer[-4:]}" if beat.name else _short_name(beat.peer)
    return PeerRow(name or nickname, cells, STYLES.get(beat.state, "dim"))


def peers_table(rows: Iterable[PeerRow], title: str | None = None) -> Table:
    from rich.markup import escape  # a nickname may look like rich's own
    from rich.table import Table  # a bootstrap node has no terminal to draw on, and does without

    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in NUMBERS else "left", no_wrap=True)
    for row in rows:
        table.add_row(escape(row.name), *row.cells, style=row.style)
    return table


def held_out_lines(view: RunView, bytes_per_token: float | None = None) -> list[str]:
    """Return how good theta is, as the peers last found; nothing while none of them has looked.

    In bits per byte, too, if it is known how much text a token stands for.
    """
    if not view.held_out:
        return []
    found = view.held_out[-1]
    perplexity = math.exp(min(found.loss, LARGEST_EXPONENT))
    said = f"perplexity {perplexity:,.1f}"
    if bytes_per_token is not None:
        said += f", {bits_per_byte(found.loss, bytes_per_token):.3f} bits per byte"
    return [f"held-out loss {found.loss:.3f} ({said}) after outer step {found.index}"]


def plain_line(row: PeerRow) -> str:
    """Return the same as one line for a log."""
    said = ", ".join(f"{column} {cell}" for column, cell in zip(COLUMNS[1:], row.cells, strict=False))
    return f"{row.name}: {said}"


def reach_lines(heartbeats: Iterable[Heartbeat]) -> list[str]:
    """Return a line for each peer that reaches others only through relays, or not at all, or whose work is in vain."""
    lines = []
    for beat in heartbeats:
        said = [f"relayed to {_count(beat.relayed)}"] if beat.relayed else []
        said += [f"cannot reach {_count(beat.unreached)} ({', '.join(beat.unreached)})"] if beat.unreached else []
        said += [beat.trouble] if beat.trouble else []
        if said:
            lines.append(f"{_short_name(beat.peer)}: {'; '.join(said)}")
    return lines


def _count(tails: Sequence[str]) -> str:
    """Return a count of peers in words: a heartbeat names only so many."""
    return f"{len(tails)}{' or more' if len(tails) == NAMED_PEERS else ''}"


def signed_lines(signed: SignedHeads) -> list[str]:
    """Return a line about the newest signed head, if there is one."""
    newest = signed.newest
    return [] if newest is None else [f"archives have signed outer step {newest.index} ({newest.head.hex()[:8]})"]


def plain_signed(signed: SignedHeads) -> dict[str, object] | None:
    """Return the newest signed head as JSON can say it."""
    newest = signed.newest
    return None if newest is None else {"outer_step": newest.index, "log_digest": newest.head.hex()}
