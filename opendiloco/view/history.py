"""A view of one run as plain values, made from its manifest, its peers' heartbeats and, where there is one, its log.

Everything here that others say is text or a number of bounded size; nobody vouches for it but their signatures. What is
not known is said, not left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opendiloco.checkpoints.held_out_curve import HeldOutCurve
from opendiloco.run import Run
from opendiloco.view.agreement import Agreement
from opendiloco.view.amending import Amended
from opendiloco.view.chronicle import KEPT, Absence, Change, Chronicle, Record
from opendiloco.view.curve import MOST_POINTS, Curve
from opendiloco.view.screen import is_finished, reachability, shown_state
from opendiloco.view.teams import Teams
from opendiloco.view.timeline import Timeline
from peers.log.folder import RunLog
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.membership import PARTICIPATING
from peers.values.anchors import Anchors

Plain = dict[str, Any]

SHOWN_PEERS = 200
SHOWN_ABSENT = 16  # peers that an entry is told to lack
REMEMBERED_SECONDS = 600.0  # for which a peer is shown that is gone
BUCKET = 0.25  # outer steps between two points of a new curve of training losses
LARGEST_LOSS = 100.0  # others may claim any
LARGEST_RATE = 1e12  # tokens a second, far more than any machine has; the sum of all rates has to stay finite
LARGEST_STEP = 2**50  # that a page can count to: an organiser may say that a run has any number of outer steps


class RunView:
    """What is known of a run here. `me` is this machine's own peer, if it is in the run."""

    def __init__(self, run: Run, me: str = "", held_out: HeldOutCurve | None = None, no_log: str = "") -> None:
        """`no_log` says why there is no log, and what to do about it."""
        self.run = run
        self.me = me
        self.timeline = Timeline()
        self._chronicle = Chronicle()
        self._teams = Teams()
        self._has_log = False
        self._no_log = no_log
        self._held_out = held_out or HeldOutCurve()
        self._losses = Curve(BUCKET)
        self._beats: Sequence[Heartbeat] = ()
        self._seen: dict[str, tuple[Heartbeat, float]] = {}  # with when something new was heard last
        self._outer_step = 0
        self._looked_at: float | None = None
        self._anchors: list[Plain] = []

    # What comes in --------------------------------------------------------------------------------------------
    def observe(self, heartbeats: Iterable[Heartbeat], at: float) -> None:
        """Take in all heartbeats that are known at a time, in seconds since the epoch."""
        self._looked_at = at
        last = min(self.run.config.total_outer_steps, LARGEST_STEP)
        self._beats = [bounded(beat, last) for beat in heartbeats if beat.state is not PeerState.LEAVING]
        self._teams.observe(self._beats, self._chronicle.contributions.keys())
        for beat in self._beats:
            known = self._seen.get(beat.peer)
            if known is None or beat.sequence > known[0].sequence:
                self._seen[beat.peer] = beat, at
        live = {beat.peer for beat in self._beats}
        old = [peer for peer, (_, seen) in self._seen.items() if peer not in live and at - seen > REMEMBERED_SECONDS]
        for peer in old:
            del self._seen[peer]
        working = [beat for beat in self._beats if beat.state in PARTICIPATING]
        if working:
            self._outer_step = statistics.median_low(beat.index for beat in working)
            averaging = [beat.index for beat in working if beat.state is PeerState.AVERAGING]
            self.timeline.observe(self._outer_step, averaging.count(self._outer_step) > 0, len(working), at)
        self._take_losses(working)

    def recall(self, held_out: Mapping[int, float]) -> None:
        """Take in losses on held-out text that are kept elsewhere."""
        for index, loss in held_out.items():
            self._held_out.add(index, loss)

    def read(self, log: RunLog | None, anchors: Anchors | None = None) -> bool:
        """Read on in the run's log. Return whether there may be more to read at once. Raises: LogError."""
        self._anchors = [] if anchors is None else plain_anchors(anchors)
        self._has_log = log is not None and len(log) > 0
        return log is not None and self._chronicle.read(log)

    def _take_losses(self, working: Sequence[Heartbeat]) -> None:
        """The median of what peers say: less than half of them can't draw the curve."""
        inner_steps = self.run.config.training.inner_steps
        training = [beat for beat in working if beat.loss is not None and beat.index == self._outer_step]
        if training:
            step = self._outer_step + statistics.median(min(beat.inner_step / inner_steps, 1.0) for beat in training)
            loss = statistics.median(beat.loss for beat in training if beat.loss is not None)
            self._losses.add(step, loss)
        every = self.run.config.evaluation.every
        for beat in self._beats:
            said = beat.held_out
            if said is not None and every and said.index % every == 0 and said.index <= self._outer_step:
                self._held_out.add(said.index, said.loss)

    # What goes out --------------------------------------------------------------------------------------------
    @property
    def outer_step(self) -> int:
        """Outer steps that more than half of the peers have taken; if none is there, those in the log."""
        is_live = any(beat.state in PARTICIPATING for beat in self._beats)
        return self._outer_step if is_live else max(self._outer_step, self._chronicle.next_index)

    def summary(self) -> Plain:
        """What a list of runs says of it."""
        trainers = [beat for beat in self._beats if beat.state is not PeerState.ARCHIVING]
        return {
            "run": self.run.run_id,
            "name": self.run.config.name,
            "outer_step": self.outer_step,
            "outer_steps": self.run.config.total_outer_steps,
            "peers": len(trainers),
            "tokens_per_second": sum(beat.tokens_per_second for beat in trainers),
            "lineage_tokens": self._lineage_tokens,
            "looked_at": self._looked_at,
        }

    def sections(self) -> dict[str, Plain]:
        """The whole view in parts, which change at different times."""
        return {
            "run": self._run(),
            "peers": self._peers(),
            "losses": self._curves(),
            "rounds": self._rounds(),
            "contributions": self._contributions(),
        }

    @property
    def _lineage_tokens(self) -> int:
        newest = self._chronicle.records[-1].lineage_tokens if self._chronicle.records else 0
        said = [beat.lineage_tokens for beat in self._beats if beat.state in PARTICIPATING]
        return max(newest, statistics.median_low(said) if said else 0)

    def _run(self) -> Plain:
        config, agreement = self.run.config, Agreement()
        agreement.observe(self._beats)
        trainers = [beat for beat in self._beats if beat.state is not PeerState.ARCHIVING]
        return self.summary() | {
            "organiser": self.run.manifest.organiser,
            "by_invitation": self.run.manifest.is_by_invitation,
            "model": config.model.path or str((config.model.config or {}).get("model_type", "")),
            "data": [source.source for source in config.data.all_sources],
            "inner_steps": config.training.inner_steps,
            "sequence_length": config.training.sequence_length,
            "codec": config.codec.kind,
            "disagreements": list(agreement.disagreements),
            "is_finished": any(is_finished(beat, config) for beat in trainers),
            "seconds_per_step": self.timeline.usual_seconds,
            "archives": len(self._beats) - len(trainers),
            "anchors": self._anchors,
            "outer_optimizer": self._amended().plain(self.run),
            "me": self.me,
            "no_log": "" if self._has_log else self._no_log or "The log has no entry yet.",
        }

    def _amended(self) -> Amended:
        said = Amended.seen_in(self.run, self._beats)
        return said.as_logged(self._chronicle.amendment) if self._has_log else said

    def _peers(self) -> Plain:
        live = {beat.peer for beat in self._beats}
        minority = minorities(self._beats)
        ordered = sorted(self._seen.values(), key=lambda seen: (seen[0].peer not in live, *self._rank(seen[0])))
        rows = [self._peer(beat, seen, beat.peer in live, beat.peer in minority) for beat, seen in ordered]
        return {"rows": rows[:SHOWN_PEERS], "more": max(0, len(rows) - SHOWN_PEERS)}

    def _rank(self, beat: Heartbeat) -> tuple[bool, bool, int, str]:
        """This machine first, then by contribution; archives last."""
        contribution = self._chronicle.contributions.get(beat.peer)
        is_archive = beat.state is PeerState.ARCHIVING
        return beat.peer != self.me, is_archive, -(contribution.tokens if contribution else 0), beat.peer

    def _peer(self, beat: Heartbeat, seen: float, is_live: bool, is_in_minority: bool) -> Plain:
        contribution = self._chronicle.contributions.get(beat.peer)
        return {
            "peer": beat.peer,
            "state": shown_state(beat, self.run.config) if is_live else "gone",
            "outer_step": beat.index,
            "inner_step": beat.inner_step,
            "tokens_per_second": beat.tokens_per_second if is_live else 0.0,
            "loss": beat.loss,
            "reach": reachability(beat),
            "relayed": len(beat.relayed),
            "unreached": len(beat.unreached),
            "trouble": beat.trouble,
            "digest": beat.head.hex()[:8],
            "disagrees": is_in_minority,
            "seen": seen,
            "tokens": None if contribution is None else contribution.tokens,
            "share": None if contribution is None else contribution.tokens / max(1, self._chronicle.tokens),
        }

    def _curves(self) -> Plain:
        held_out = sorted(self._held_out.losses.items())
        thinned = held_out[:: 1 + len(held_out) // MOST_POINTS]
        return {
            "training": [(round(step, 2), round(loss, 4)) for step, loss in self._losses.points],
            "held_out": [(step, round(bounded_loss(loss), 4)) for step, loss in thinned],
        }

    def _rounds(self) -> Plain:
        """Entries from the log, and what was seen of the time that they took; the newest last."""
        entries = {record.index: record for record in self._chronicle.records}
        spans = self.timeline.spans
        newest = sorted({*entries, *spans})[-KEPT:]
        rows = []
        for index in newest:
            record, span = entries.get(index), spans.get(index)
            row: Plain = {"index": index} | (plain_record(record, self.run) if record else {})
            rows.append(row | (span._asdict() if span else {}))
        return {"rows": rows}

    def _contributions(self) -> Plain:
        shown = sorted(self._chronicle.contributions.items(), key=lambda one: (-one[1].tokens, one[0]))
        rows = [
            {
                "peer": peer,
                "team": self._teams.of(peer),
                "tokens": found.tokens,
                "entries": found.entries,
                "last": found.last,
            }
            for peer, found in shown[:SHOWN_PEERS]
        ]
        board = self._teams.board(self._chronicle.contributions)
        teams = [{"team": team, "tokens": found.tokens, "peers": found.peers} for team, found in board.items()]
        return {
            "rows": rows,
            "more": max(0, len(shown) - SHOWN_PEERS),
            "teams": teams[:SHOWN_PEERS],
            "tokens": self._chronicle.tokens,
            "first": self._chronicle.first,
        }


def bounded(beat: Heartbeat, last_step: int) -> Heartbeat:
    """Return the same heartbeat with numbers that can be added up and drawn, in a run of so many outer steps."""
    said = {"index": beat.index, "tokens_per_second": beat.tokens_per_second, "loss": beat.loss}
    held: dict[str, Any] = {
        "index": min(beat.index, last_step),
        "tokens_per_second": min(beat.tokens_per_second, LARGEST_RATE),
        "loss": None if beat.loss is None else bounded_loss(beat.loss),
    }
    return beat if held == said else beat.model_copy(update=held)


def bounded_loss(loss: float) -> float:
    """Return the loss, or the largest that is believed, of either sign."""
    return max(-LARGEST_LOSS, min(loss, LARGEST_LOSS))


def plain_record(record: Record, run: Run) -> Plain:
    """An entry of a run as JSON can say it, digests in hexadecimal."""
    signatures = record.signatures
    return {
        "digest": record.digest.hex(),
        "payload": record.payload.hex(),
        "state": None if record.state_digest is None else record.state_digest.hex(),
        "members": record.members,
        "tokens": record.tokens,
        "signed": None if signatures is None else signatures.signed,
        "voters": None if signatures is None else signatures.voters,
        "certified": None if signatures is None else signatures.is_certified,
        "alone": None if signatures is None else signatures.is_alone,
        "absent": [plain_absence(one) for one in record.absent[:SHOWN_ABSENT]],
        "absent_count": len(record.absent),
        "joined": list(record.joined[:SHOWN_ABSENT]),
        "joined_count": len(record.joined),
        "change": None if record.change is None else plain_change(record.change, run),
    }


def plain_change(change: Change, run: Run) -> Plain:
    """What an entry changes of the outer optimizer."""
    new, old = change.amendment, change.before or run.config.outer_optimizer
    return {
        "number": new.number,
        "learning_rate": [old.learning_rate, new.learning_rate],
        "momentum": [old.momentum, new.momentum],
    }


def plain_absence(absence: Absence) -> Mapping[str, str]:
    return {"peer": absence.peer, "kind": absence.kind, "why": absence.why}


def plain_anchors(anchors: Anchors) -> list[Plain]:
    """The newest head that each of the run's anchors has signed."""
    found = []
    for key in anchors.keys:
        newest = anchors.newest_of(key)
        if newest is not None or key in anchors.liars:
            signed = (None, None) if newest is None else (newest.index, newest.head.hex())
            found.append({"anchor": key, "outer_step": signed[0], "digest": signed[1], "lies": key in anchors.liars})
    return found


def minorities(heartbeats: Iterable[Heartbeat]) -> set[str]:
    """Return the peers that name other digests at a place in the log than most others who are there."""
    said: dict[int, dict[tuple[bytes, bytes], set[str]]] = {}
    for beat in heartbeats:
        if beat.state is not PeerState.ARCHIVING:
            said.setdefault(beat.index, {}).setdefault((beat.head, beat.state_digest), set()).add(beat.peer)
    found = set[str]()
    for groups in said.values():
        ordered = sorted(groups.values(), key=len, reverse=True)
        if len(ordered) > 1:
            found |= set().union(*(ordered if len(ordered[0]) == len(ordered[1]) else ordered[1:]))
    return found
