"""A run: the peers' protocol settings and the training configuration, both from one signed manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from opendiloco.config.data import TokenizerSection
from opendiloco.config.model import ModelSection
from opendiloco.config.overrides import why_not_followed
from opendiloco.config.run_config import RunConfig
from opendiloco.data.hub import is_local_path
from opendiloco.data.own_files import OwnFiles, is_local, local_sources, volunteered
from opendiloco.errors import DataError
from peers.errors import ManifestError, SwarmUnreachableError
from peers.log.settings import RunSettings
from peers.log.state import Quorum
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest

if TYPE_CHECKING:
    from peers.network.transport import HivemindTransport


@dataclass(frozen=True)
class Run:
    manifest: SignedManifest
    config: RunConfig
    goes_on_alone: bool = True
    """True if this machine's owner lets it train with a minority when most peers have been gone for long."""
    has_runs_text: bool = True
    """True if this machine trains on the text that the manifest defines. A digest shows it if volunteers choose."""

    def __post_init__(self) -> None:
        streaming = self.config.streaming
        if streaming.layers_per_fragment is not None and streaming.sizes is None:
            raise ManifestError(
                "streaming.sizes is missing; a run with several fragments needs the number of values of each.",
                "Create it with `diloco-peer run create`, which fills them in.",
            )

    @classmethod
    def sign(cls, config: RunConfig, organiser: Identity) -> Run:
        """Return a new run with a manifest that its organiser has signed. Raises: ManifestError."""
        return cls(SignedManifest.create(organiser, config.name, config.to_manifest_content()), config)

    @classmethod
    def from_manifest(cls, manifest: SignedManifest) -> Run:
        """Return the run that a manifest defines. Raises: ManifestError if this version cannot read the
        configuration."""
        return cls(manifest, RunConfig.from_manifest_content(manifest.values))

    def with_data(self, folders: Sequence[Path] = ()) -> Run:
        """Return the run with a volunteer's `folders` in place of its local data sources. Raises: DataError."""
        data, sources = self.config.data, self.config.data.all_sources
        own = [source for source in sources if is_local(source.source)] or sources
        # Only a digest can show that a volunteer's folder contains the run's text.
        says_which = self.config.evaluation.digest is not None or all(source.digest for source in own)
        config = self.config.model_copy(update={"data": volunteered(data, folders)})
        return replace(self, config=config, has_runs_text=not folders or says_which)

    def with_own(self, own: OwnFiles) -> Run:
        """Return the run with the volunteer's own files in place of the manifest's local paths of model and tokenizer.

        Raises: DataError for a local path in the manifest that the volunteer has not replaced.
        """
        for table, path in local_tables(self.config).items():
            if getattr(own, table) is None:
                raise DataError(
                    f"{table}.path = {path!r} is a place on a machine; what you have not named is not read.",
                    f"Name the run's {table} on this machine: --{table} PATH, or own=OwnFiles({table}=PATH) in Python.",
                )
        return replace(self, config=with_own_files(self.config, own))

    @property
    def run_id(self) -> str:
        return self.manifest.run_id

    @property
    def settings(self) -> RunSettings:
        """The part of the run's settings that the peer protocol needs."""
        training, rounds = self.config.training, self.config.rounds
        return RunSettings(
            run=self.run_id,
            manifest_digest=self.manifest.digest,
            organiser=self.manifest.organiser,
            why_not_followed=lambda amendment: why_not_followed(amendment, self.config),
            inner_steps=training.inner_steps,
            samples_per_lease=training.inner_steps * training.batch_size,
            tokens_per_sample=training.sequence_length,
            minimum_peers=rounds.minimum_peers,
            quorum=Quorum(rounds.quorum),
            staleness=rounds.staleness,
            smallest_share=rounds.smallest_share,
            clip=rounds.clip,
            exclusion=rounds.exclusion,
            contributions=rounds.enough,
            overlap=self.config.streaming.overlap,
            snapshot_every=self.config.snapshots.every,
            goes_on_alone=self.goes_on_alone,
            fragments=len(self.config.streaming.sizes or (1,)),
            probation=self.config.admission.probation,
            timing=rounds.timing,
        )


def local_tables(config: RunConfig) -> dict[str, str]:
    """Return the local paths in the tables `model` and `tokenizer`, by the table's name. Each volunteer must name its
    own files for them."""
    paths = {"model": config.model.path, "tokenizer": config.tokenizer.path}
    is_file = config.tokenizer.kind == "file"
    return {
        table: path
        for table, path in paths.items()
        if path is not None and (is_local_path(path) or (is_file and table == "tokenizer"))
    }


def join_options(run: Run) -> str:
    """Return the options that `diloco-peer join` needs for this run besides the run itself, each after a space."""
    ticket = " --ticket TICKET" * run.manifest.is_by_invitation
    folders = " --data FOLDER" * len(local_sources(run.config.data))
    return ticket + folders + "".join(f" --{table} PATH" for table in local_tables(run.config))


def with_own_files(config: RunConfig, own: OwnFiles) -> RunConfig:
    """Return the configuration with a volunteer's own files in place of its local paths. Raises: DataError for a file
    that replaces no path of the run."""
    sections: dict[str, ModelSection | TokenizerSection] = {}
    for table, section, given in (("model", config.model, own.model), ("tokenizer", config.tokenizer, own.tokenizer)):
        if given is None:
            continue
        if section.path is None:
            raise DataError(f"--{table} {given}: this run's manifest defines its {table}.", f"Leave out --{table}.")
        sections[table] = section.model_copy(update={"path": str(given.absolute())})
    return config.model_copy(update=sections)


async def find_run(network: HivemindTransport, run_id: str, remembered: SignedManifest | None = None) -> Run:
    """Return the run `run_id`, from the remembered manifest if it is this run's, otherwise from the network. Raises:
    SwarmUnreachableError, ManifestError."""
    if remembered is not None and remembered.run_id == run_id:
        network.learn(remembered)
        return Run.from_manifest(remembered)
    manifest = await network.find_manifest(run_id)
    if manifest is None:
        raise SwarmUnreachableError(
            f"no peer at the given addresses knows the run {run_id}.",
            "Check the run id and the addresses; ask the organiser whether the run still exists.",
        )
    return Run.from_manifest(manifest)
