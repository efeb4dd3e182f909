"""The state of a run at one moment, computed from its peers' heartbeats and its log, for all displays of the run.

Heartbeats are signed, but their claims may be false. So numbers are clamped, and less than half of the peers cannot
change the outer step that is shown.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from opendiloco.config.run_config import RunConfig
from opendiloco.evaluation_turns import bits_per_byte, loss_in_words
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
LARGEST_LOSS = 100.0  # reported losses are clamped to ± this limit, in nats per token
LARGEST_RATE = 1e12  # reported tokens a second are clamped to this limit, so that their sum stays finite
LARGEST_STEP = 2**50  # reported outer steps are clamped to this limit, which JavaScript represents exactly


# One peer ---------------------------------------------------------------------------------------------------------
def _shown_state(beat: Heartbeat, config: RunConfig) -> str:
    return FINISHED if is_finished(beat, config) else str(beat.state)


def is_finished(beat: Heartbeat, config: RunConfig) -> bool:
    """Return True if the peer has taken the run's last outer step and stays to send the result to others."""
    return beat.state is PeerState.TRAINING and beat.index >= outer_steps_in_force(config, beat.amendment)


def holders(beats: Iterable[Heartbeat], step: int) -> str:
    """Return, in words, the numbers of archives and of other volunteers that have reached the outer step `step`, or an
    empty text if there are none."""
    states = [beat.state for beat in beats if beat.index >= step]
    archives, volunteers = states.count(PeerState.ARCHIVING), sum(state in PARTICIPATING for state in states)
    parts = [counted(archives, "archive")] if archives else []
    parts += [counted(volunteers, "other volunteer")] if volunteers else []
    return " and ".join(parts)


def reachability(beat: Heartbeat) -> str:
    """Return "open" if other peers can connect to the peer directly, "NAT" if only through a relay, "-" if unknown."""
    hosts = [parse_endpoint(endpoint)[0] for endpoint in beat.endpoints]
    if any(map(_is_on_the_internet, hosts)) or (
        hosts and not any(_is_on_the_internet(host_of(relay)) for relay in beat.relays)
    ):
        return OPEN
    return BEHIND_NAT if beat.relays else UNKNOWN


def _is_on_the_internet(host: str | None) -> bool:
    return host is not None and (is_public(host) or not is_numeric(host))


def plain_peer(beat: Heartbeat, config: RunConfig) -> dict[str, object]:
    """Return a peer's heartbeat as JSON values, in the words that all displays share. The values are not verified."""
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
    """Return a copy of a heartbeat with its outer step at most `last_step`, and its speed and loss clamped to what a
    view shows."""
    return beat.model_copy(
        update={
            "index": min(beat.index, last_step),
            "tokens_per_second": min(beat.tokens_per_second, LARGEST_RATE),
            "loss": None if beat.loss is None else bounded_loss(beat.loss),
        }
    )


def bounded_loss(loss: float) -> float:
    """Return a loss clamped to ±LARGEST_LOSS."""
    return max(-LARGEST_LOSS, min(loss, LARGEST_LOSS))


# Agreement --------------------------------------------------------------------------------------------------------
class Agreement:
    """The comparison of the log and state digests that peers report. Two peers at the same outer step must report the
    same digests."""

    def __init__(self) -> None:
        self._digests: dict[int, dict[tuple[bytes, bytes], set[str]]] = defaultdict(lambda: defaultdict(set))
        self._heads: dict[int, dict[bytes, set[str]]] = defaultdict(lambda: defaultdict(set))  # also those of archives

    def observe(self, heartbeats: Iterable[Heartbeat]) -> None:
        """Record the digests of the log and of the model's state that the heartbeats report."""
        for beat in heartbeats:
            self._heads[beat.index][beat.head].add(beat.peer)
            if beat.state is not PeerState.ARCHIVING:  # an archive has no state to compare
                self._digests[beat.index][beat.head, beat.state_digest].add(beat.peer)

    @property
    def compared(self) -> int:
        """The number of outer steps at which at least two peers have reported digests."""
        return sum(len(_peers_in(groups)) > 1 for groups in self._digests.values())

    @property
    def disagreements(self) -> tuple[int, ...]:
        """The outer steps at which peers have reported different digests, in ascending order."""
        return tuple(sorted(index for index, groups in self._digests.items() if len(groups) > 1))

    @property
    def minorities(self) -> set[str]:
        """The peers that at some outer step reported other digests than the largest group of peers. If the two largest
        groups are equally large, both are included."""
        found = set[str]()
        for index in self.disagreements:
            most, second, *others = sorted(self._digests[index].values(), key=len, reverse=True)
            found |= second.union(*others, most if len(most) == len(second) else ())
        return found

    @property
    def verdict(self) -> bool | None:
        """True if all reported digests agree, False if some disagree, None if no two peers have reported the same outer
        step."""
        if self.disagreements:
            return False
        return True if self.compared else None

    def __str__(self) -> str:
        if self.disagreements:
            places = ", ".join(str(index) for index in self.disagreements)
            return f"the peers DISAGREE at outer step {places}: their log or state digests differ"
        if not self.compared:
            logs = [groups for groups in self._heads.values() if len(_peers_in(groups)) > 1]
            if not logs:
                return "no two peers have reported a state digest at the same outer step yet: nothing to compare"
            peers = len(set().union(*map(_peers_in, logs)))
            verb = "DIFFER" if any(len(groups) > 1 for groups in logs) else "agree"
            return f"the logs of {peers} peers {verb}; no two have reported a state digest at the same outer step yet"
        plural = "s" if self.compared > 1 else ""
        return f"all log and state digests agree ({self.compared} outer step{plural} compared)"


def _peers_in(groups: Mapping[Any, set[str]]) -> set[str]:
    """Return the peers of all groups together."""
    return set().union(*groups.values())


# The run ----------------------------------------------------------------------------------------------------------
class RunView:
    """A run's peers, progress and amendments at one moment.

    `peers` are those that have not sent a farewell, in the order of the heartbeats, with numbers clamped. `chronicle`
    is the part of the log that was read, if there is a log; `step_before` is the outer step of the view before.
    `agreement` keeps the digests of earlier views.
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
        """The amendments. The log determines which is in force, or without a log the heartbeats do."""
        last = min(self.outer_steps, LARGEST_STEP)
        self.peers = tuple(_bounded(beat, last) for beat in beats)
        self.agreement = agreement or Agreement()
        self.agreement.observe(beats)
        self.chronicle = chronicle
        self._step_before = step_before

    @cached_property
    def trainers(self) -> tuple[Heartbeat, ...]:
        """All peers except archives, including those not yet at work."""
        return tuple(beat for beat in self.peers if beat.state is not PeerState.ARCHIVING)

    @cached_property
    def working(self) -> tuple[Heartbeat, ...]:
        """The peers that have the run's state and work on the next entry."""
        return tuple(beat for beat in self.peers if beat.state in PARTICIPATING)

    @cached_property
    def outer_step(self) -> int:
        """The lower median of the outer steps of the peers at work. If no peer is at work, the largest outer step of
        the archives, of the log, and of the preceding `RunView`."""
        if self.working:
            return statistics.median_low(beat.index for beat in self.working)
        archived = [beat.index for beat in self.peers if beat.state is PeerState.ARCHIVING]
        return max([self._step_before, self.chronicle.next_index if self.chronicle else 0, *archived])

    @property
    def outer_steps(self) -> int:
        return outer_steps_in_force(self.run.config, self.amended.in_force)

    @property
    def is_finished(self) -> bool:
        return 0 < self.outer_steps <= self.outer_step

    @property
    def tokens_per_second(self) -> float:
        return sum(beat.tokens_per_second for beat in self.trainers)

    @property
    def lineage_tokens(self) -> int:
        """The number of tokens trained in the run so far."""
        logged = self.chronicle.records[-1].lineage_tokens if self.chronicle and self.chronicle.records else 0
        return max(logged, statistics.median_low(beat.lineage_tokens for beat in self.working) if self.working else 0)

    @property
    def held_out(self) -> list[HeldOutLoss]:
        """The newest held-out loss of each peer, in the order of outer steps. Losses at outer steps that the run does
        not evaluate or has not reached are ignored."""
        every = self.run.config.evaluation.every
        claimed = [beat.held_out for beat in self.peers if beat.held_out is not None]
        due = [one for one in claimed if every and one.index % every == 0 and one.index <= self.outer_step]
        return sorted(due, key=lambda held_out: held_out.index)

    @property
    def model(self) -> str:
        """The model's path if the manifest names one, otherwise the model's type."""
        model = self.run.manifest.values["model"]  # the manifest's values do not include defaults
        return model.get("path") or str((model.get("config") or {}).get("model_type", "unknown model"))

    @property
    def sources(self) -> list[str]:
        return [source.source for source in self.run.config.data.all_sources]


# On a terminal --------------------------------------------------------------------------------------------------------
COLUMNS = ("peer", "state", "inner step", "tokens/s", "loss", "outer step", "log digest", "reach")
HEADINGS = ("peer", "state", "inner", "tokens/s", "loss", "outer", "digest", "reach")
"""Short names of the columns, so that the table fits 80 columns."""
NUMBERS = {"inner", "tokens/s", "loss", "outer"}
STYLES = {
    PeerState.TRAINING: "green",
    PeerState.READY: "cyan",
    PeerState.AVERAGING: "magenta",
    PeerState.LEAVING: "red",
}


@dataclass(frozen=True)
class PeerRow:
    """One peer's row in the table of peers. It may have fewer `cells` than the table has columns."""

    name: str
    cells: tuple[str, ...]
    style: str = "dim"


def _short_name(peer: str) -> str:
    """Return the last 8 characters of a peer id, because all ids have the same beginning."""
    return f"…{peer[-8:]}"


def row_of(beat: Heartbeat, config: RunConfig, name: str | None = None, is_paused: bool = False) -> PeerRow:
    """Return a peer's row in the table of peers. `name` replaces the peer's nickname. A heartbeat does not say whether
    its peer `is_paused`."""
    cells = (
        "paused" if is_paused else _shown_state(beat, config),
        f"{beat.inner_step}/{config.training.inner_steps}",
        f"{0.0 if is_paused else beat.tokens_per_second:,.0f}",
        "-" if beat.loss is None else f"{beat.loss:.3f}",
        f"{beat.index}/{outer_steps_in_force(config, beat.amendment)}",
        beat.head.hex()[:8],
        reachability(beat),
    )
    nickname = f"{beat.name[:7]}…{beat.peer[-4:]}" if beat.name else _short_name(beat.peer)
    return PeerRow(name or nickname, cells, STYLES.get(beat.state, "dim"))


def peers_table(rows: Iterable[PeerRow], title: str | None = None) -> Table:
    from rich.markup import escape  # a nickname may contain rich's markup
    from rich.table import Table  # imported late, because a bootstrap node does not install rich

    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in NUMBERS else "left", no_wrap=True)
    for row in rows:
        table.add_row(escape(row.name), *row.cells, style=row.style)
    return table


def held_out_lines(view: RunView, bytes_per_token: float | None = None) -> list[str]:
    """Return a line of text with the newest held-out loss, or no line if no peer has measured one. With
    `bytes_per_token` the line includes bits per byte."""
    if not view.held_out:
        return []
    found = view.held_out[-1]
    bits = None if bytes_per_token is None else bits_per_byte(found.loss, bytes_per_token)
    return [f"held-out loss {loss_in_words(found.loss, bits)} after outer step {found.index}"]


def plain_line(row: PeerRow) -> str:
    """Return a row of the table of peers as one line for the log."""
    cells = ", ".join(f"{column} {cell}" for column, cell in zip(COLUMNS[1:], row.cells, strict=False))
    return f"{row.name}: {cells}"


def reach_lines(heartbeats: Iterable[Heartbeat]) -> list[str]:
    """Return a line of text for each peer that uses relays, cannot reach some peers, or reports a trouble."""
    lines = []
    for beat in heartbeats:
        parts = [f"relayed to {_count(beat.relayed)}"] if beat.relayed else []
        parts += [f"cannot reach {_count(beat.unreached)} ({', '.join(beat.unreached)})"] if beat.unreached else []
        parts += [beat.trouble] if beat.trouble else []
        if parts:
            lines.append(f"{_short_name(beat.peer)}: {'; '.join(parts)}")
    return lines


def _count(tails: Sequence[str]) -> str:
    """Return the number of peers that a heartbeat names, as text, with "or more" at NAMED_PEERS, the most that it can
    name."""
    return f"{len(tails)}{' or more' if len(tails) == NAMED_PEERS else ''}"


def signed_lines(signed: SignedHeads) -> list[str]:
    """Return a line of text about the newest head that archives have signed, or no line if there is none."""
    newest = signed.newest
    return [] if newest is None else [f"archives have signed outer step {newest.index} ({newest.head.hex()[:8]})"]


def plain_signed(signed: SignedHeads) -> dict[str, object] | None:
    """Return, as JSON values, the newest head that archives have signed, or None if there is none."""
    newest = signed.newest
    return None if newest is None else {"outer_step": newest.index, "log_digest": newest.head.hex()}
