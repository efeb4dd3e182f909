"""The audit of a stored log, which checks headers, signatures and payloads, computes the states that follow from the
payloads, and compares them with the recorded digests.

It changes nothing on the disk. Only states from the manifest on need torch and the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np

from opendiloco.config.model import check_initial_weights
from opendiloco.config.overrides import Overrides
from opendiloco.config.run_config import RunConfig
from opendiloco.data.own_files import OwnFiles
from opendiloco.errors import AmendmentError
from opendiloco.run import Run
from opendiloco.storage.loading import Checkpoint, Checkpoints
from opendiloco.storage.run_folder import RunFolder
from opendiloco.training.codec import BlockCodec, block_bytes
from opendiloco.training.outer import OuterState
from peers.audit.proofs import BadContribution, Verifier, read_proof
from peers.log.certificate import CertificateError, prove
from peers.log.chain import Chain, Entry
from peers.log.folder import ENTRIES, PAYLOADS, LogFolderError, payload_path, proof_path, read_chain, read_payload
from peers.log.header import NO_PAYLOAD, Fault, Header, may_be_named
from peers.log.state import LogState
from peers.values.identity import verify
from peers.values.manifest import Amendment, newest
from peers.values.signed_heads import SignedHeads, SignedHeadsError, unpack_heads
from peers.values.wire import WireError
from peers.values.workload import BadBlocksError, Blocks


@dataclass
class Findings:
    """The results of an audit: for each property of the log, the indices of the entries for which it is `verified` or
    `unverified`; and the errors found (`wrong`), each with its entry's index."""

    verified: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    unverified: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    wrong: list[tuple[int, str]] = field(default_factory=list)
    unreadable_amendment: AmendmentError | None = None
    """The reason why states are not computed from some entry on, although all payloads are there."""

    def add_verified(self, finding: str, index: int) -> None:
        self.verified[finding].add(index)

    def add_unverified(self, finding: str, index: int) -> None:
        self.unverified[finding].add(index)

    def facts(self) -> dict[str, object]:
        """Return the findings as a dictionary of JSON values, for scripts."""
        verified, unverified = (
            {what: sorted(indices) for what, indices in found.items()} for found in (self.verified, self.unverified)
        )
        wrong = [{"entry": index, "what": what} for index, what in sorted(self.wrong)]
        return {"verified": verified, "not_verified": unverified, "wrong": wrong}

    def lines(self) -> Iterable[str]:
        """Yield the findings as lines of text, for people."""
        for heading, found in (("verified", self.verified), ("not verified", self.unverified)):
            yield from (f"{heading}: {what}: {_entries(sorted(indices))}" for what, indices in found.items())
        yield from (f"wrong: entry {index}: {what}" for index, what in sorted(self.wrong))


def _entries(indices: Iterable[int]) -> str:
    """Return ascending indices of entries as a text, such as "entries 0 to 3, 7"."""
    runs = [list(run) for _, run in groupby(enumerate(indices), lambda placed: placed[1] - placed[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    text = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in ends)
    return f"entr{'y' if text.isdecimal() else 'ies'} {text}"


class _States:
    """A replay of a log: computes the state after each outer step, and compares it with the recorded digest."""

    def __init__(
        self, config: RunConfig, start: OuterState, index: int, origin: str, amendment: Amendment | None = None
    ) -> None:
        """Begin with the state `start` after `index` outer steps. `origin` names the source of `start` in words, such
        as "the manifest"; `amendment` is the amendment in force at `start`."""
        self._state = start
        self._codecs = [BlockCodec.of(config.codec, part.stop - part.start) for part in start.fragments]
        self._config, self._next = config, index
        self._amendment = amendment
        self._origin = origin
        self._broken = ""  # the reason, in words, why later states cannot be computed; empty if they can be

    def follow(self, entry: Entry, payload: Blocks | None, findings: Findings) -> None:
        index = entry.index
        if index < self._next:
            if index < self._next - 1:  # entry `_next - 1` was already compared with the checkpoint
                findings.add_unverified(f"states before {self._origin}", index)
            return
        self._apply(entry, payload, findings)
        if entry.fragment < len(self._codecs) - 1:
            return
        self._amendment = newest(self._amendment, entry.content.amendment)  # most entries have no amendment
        if self._broken:
            findings.add_unverified(f"states, {self._broken}", index)
        elif entry.state_digest is None:
            findings.add_unverified("states whose digest was not recorded", index)
        elif entry.state_digest == self._state.digest():
            findings.add_verified(f"states, from {self._origin} on", index)
        else:
            findings.wrong.append((index, "its payload leads to another state than the recorded one"))
            self._broken = f"which follow from the wrong entry {index}"

    def _apply(self, entry: Entry, payload: Blocks | None, findings: Findings) -> None:
        """Apply an entry's payload to the state, unless the entry has no payload or the state before it is unknown."""
        if self._broken or not _has_payload(entry):
            return
        if payload is None:
            self._broken = f"without the payload of entry {entry.index}"
            return
        try:
            checked = self._codecs[entry.fragment].checked(payload)
            overrides = Overrides.of(self._amendment, self._config)
            self._state.apply(checked, entry.index, entry.fragment, overrides)
        except BadBlocksError as error:
            findings.wrong.append((entry.index, f"its payload cannot be applied: {error}"))
            self._broken = f"which follow from the wrong entry {entry.index}"
        except AmendmentError as error:
            findings.unreadable_amendment = error
            self._broken = "which follow from an amendment that this version does not understand"


def _check_signatures(entry: Entry, header: Header, before: LogState, findings: Findings) -> None:
    """Check that voters of `before`, the log's state before the entry, have signed the entry's certificate."""
    if before.position.head != header.previous:
        findings.add_unverified("signatures, because the entries before are missing", entry.index)
        return
    if entry.proof is None:
        findings.add_unverified("signatures, which are missing", entry.index)
        return
    try:
        proof = prove(entry.proof, before.of(header.fragment), header, verify)
    except CertificateError as error:
        findings.wrong.append((header.index, str(error)))
        return
    if proof.is_certified:
        findings.add_verified("signatures of a quorum of the voters before", header.index)
    else:
        findings.add_unverified("entries that a minority made", header.index)


class _Proofs:
    """A checker of the stored proofs of the faults that headers name."""

    def __init__(self, folder: Path, run: Run, findings: Findings) -> None:
        self._folder = folder
        self._run = run.run_id
        self._exclusion = run.settings.exclusion
        self._heads = dict[int, bytes]()
        self._findings = findings

    def check(self, header: Header, before: LogState) -> None:
        """Check the stored proof of each fault that a header names, and add the results to the findings. `before` is
        the log's state before the header's entry. Raises: OSError."""
        self._heads[before.position.index] = before.position.head
        for fault in header.faults:
            path = proof_path(self._folder, fault.proof)
            if path.exists():
                self._check_proof(fault, path.read_bytes(), header.index)
            else:
                self._findings.add_unverified(f"the proof that {fault.peer} lied, which is missing", header.index)

    def _check_proof(self, fault: Fault, data: bytes, index: int) -> None:
        """Check `data`, the stored proof of a fault that entry `index` names, and add the result to the findings."""
        findings, wrong = self._findings, f"the stored proof does not convict {fault.peer}"
        try:
            proof = read_proof(fault.kind, data)
        except WireError:
            findings.wrong.append((index, wrong))
            return
        place = proof.position
        head = self._heads.get(place.index, place.head)
        if proof.fault != fault or head != place.head:
            findings.wrong.append((index, wrong))
        elif not may_be_named(place.index, index, self._exclusion):
            problem = f"it names {fault.peer} for a lie at entry {place.index}, which this entry may not name"
            findings.wrong.append((index, problem))
        elif isinstance(proof, BadContribution):
            findings.add_unverified("proofs of false contributions, which need the model", index)
        elif not proof.convicts(Verifier(self._run, verify, payloads=())):
            findings.wrong.append((index, wrong))
        elif place.index not in self._heads:
            findings.add_unverified("proofs of faults, because the entries before are missing", index)
        else:
            findings.add_verified("proofs of faults", index)


def audit(folder: Path, run: Run, checkpoint: Checkpoint | None, own: OwnFiles) -> Findings:
    """Return the findings of an audit of the log in `folder`, as far as the stored data allow. Raises: LogFolderError,
    AmendmentError, and the exceptions of building the model."""
    findings = Findings()
    try:
        chain = _check_chain(folder / ENTRIES, run, findings)
        _check_signed_heads(folder, run, chain, findings)
        states = _start_states(folder, run, chain, checkpoint, findings, own)
        for entry in chain.entries:
            payload = _check_payload(folder, run, entry, findings) if _has_payload(entry) else None
            if states is not None:
                states.follow(entry, payload, findings)
    except OSError as error:
        raise LogFolderError(
            f"the log in {folder} cannot be read: {error.strerror or error}.", "Name a log that this user may read."
        ) from error
    return findings


def _check_chain(file: Path, run: Run, findings: Findings) -> Chain:
    """Return the log's valid entries, and add the results for signatures and proofs to `findings`. Raises: OSError."""
    proofs = _Proofs(file.parent, run, findings)

    def see(entry: Entry, header: Header, before: LogState) -> None:
        _check_signatures(entry, header, before, findings)
        proofs.check(header, before)

    chain, problem = read_chain(file, run.settings.empty_log, see)
    origin = "the first stored one" if chain.first else "the manifest"
    for entry in chain.entries:
        findings.add_verified(f"headers, from {origin} on", entry.index)
    if problem:
        findings.wrong.append((chain.next_index, problem))
    return chain


def _check_signed_heads(folder: Path, run: Run, chain: Chain, findings: Findings) -> None:
    """Compare the log with the heads that the run's archives have signed, if any are stored. Raises: OSError."""
    path = RunFolder(folder.absolute().parent).signed_heads
    if not path.exists():
        return
    try:
        signed = SignedHeads(run.run_id, run.manifest.archives).taking(unpack_heads(path.read_bytes()))
    except SignedHeadsError as error:
        findings.wrong.append((0, f"{path} was not signed by the run's archives: {error}"))
        return
    heads = {index: head for index in signed.indices if (head := chain.head(index - 1)) is not None}
    if (other := signed.contradiction(heads)) is not None:
        findings.wrong.append((other.index - 1, f"the archive {other.archive} has signed another entry"))
    for index in sorted(signed.indices & heads.keys()):
        if any(one.head == heads[index] for one in signed.believed):
            findings.add_verified("heads that the run's archives have signed", index - 1)


def _check_payload(folder: Path, run: Run, entry: Entry, findings: Findings) -> Blocks | None:
    """Add the finding that an entry's payload is verified, missing or wrong. Return the payload if it is verified, else
    None. Raises: OSError."""
    wanted = entry.content.payload
    path = payload_path(folder / PAYLOADS, entry.index, wanted)
    try:
        payload = read_payload(path, block_bytes(run.config.codec))
    except FileNotFoundError:
        findings.add_unverified("payloads, which are missing", entry.index)
        return None
    if payload.digest != wanted:
        findings.wrong.append((entry.index, f"{path} is not the payload that its header names"))
        return None
    findings.add_verified("payloads", entry.index)
    return payload.data


def _start_states(
    folder: Path, run: Run, chain: Chain, checkpoint: Checkpoint | None, findings: Findings, own: OwnFiles
) -> _States | None:
    """Return a replay that starts from `checkpoint`, else from the run's initial model, else from a checkpoint in the
    run's folder. If all of these are missing, add a finding and return None.

    Raises: CheckpointError if the folder of checkpoints is unreadable.
    """
    has_first = len(chain) > 0 and chain.first == 0 and all(_can_apply(folder, one) for one in chain.cycles(0, 1))
    if checkpoint is None and has_first:
        from opendiloco.model.build import initial_theta

        theta = initial_theta(run.with_own(own).config)
        check_initial_weights(theta, run.config.model)
        start = OuterState(theta, run.config.outer_optimizer, run.config.streaming.fragments)
        return _States(run.config, start, 0, "the manifest")
    checkpoint = checkpoint or _find_checkpoint(folder, run, chain)
    if checkpoint is not None:
        return _states_from(checkpoint, run, chain, findings)
    for entry in chain.entries:
        findings.add_unverified("states, because the first payload and a checkpoint are missing", entry.index)
    return None


def _find_checkpoint(folder: Path, run: Run, chain: Chain) -> Checkpoint | None:
    """Return the oldest intact checkpoint in the run's folder after which no payload is missing, else the newest intact
    checkpoint, else None. Raises: CheckpointError."""
    beside = Checkpoints(RunFolder(folder.absolute().parent).checkpoints, run.run_id)
    gaps = (entry.index + 1 for entry in reversed(chain.entries) if not _can_apply(folder, entry))
    first = next(gaps, chain.first)
    indices = [index for index in beside.indices() if index <= chain.next_index]
    return beside.load_first(sorted(indices, key=lambda index: (index < first, abs(index - first))))


def _has_payload(entry: Entry) -> bool:
    """Return True if an entry has a payload. An entry whose fragment no peer trained has none."""
    return entry.content.payload != NO_PAYLOAD


def _can_apply(folder: Path, entry: Entry) -> bool:
    return not _has_payload(entry) or payload_path(folder / PAYLOADS, entry.index, entry.content.payload).exists()


def _states_from(checkpoint: Checkpoint, run: Run, chain: Chain, findings: Findings) -> _States | None:
    origin = f"the checkpoint of outer step {checkpoint.index}"
    place = run.settings.empty_log.at(checkpoint.last, checkpoint.ends).position
    before, after = chain.entry(place.index - 1), chain.entry(place.index, 0)
    if chain.head(place.index - 1) != place.head and not (after and after.content.previous == place.head):
        for entry in chain.entries:
            findings.add_unverified(f"states, because the log does not have the last entry of {origin}", entry.index)
        return None
    if before is not None:
        if before.state_digest is None:
            findings.add_unverified("states whose digest was not recorded", before.index)
        elif before.state_digest == checkpoint.state_digest:
            findings.add_verified(f"states, as in {origin}", before.index)
        else:
            findings.wrong.append((before.index, f"the recorded state is not that of {origin}"))
    momentum, theta = np.frombuffer(checkpoint.data, np.float32).reshape(2, -1).copy()
    state = OuterState(theta, run.config.outer_optimizer, run.config.streaming.fragments)
    state.replace(theta, momentum)
    return _States(run.config, state, place.index, origin, checkpoint.last.amendment if checkpoint.last else None)
