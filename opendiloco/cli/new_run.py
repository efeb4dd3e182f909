"""What is checked and named of a run before its organiser signs it: what others will hold theirs against."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opendiloco.config.run_config import RunConfig

logger = logging.getLogger(__name__)


def check(config: RunConfig) -> None:
    """Whether others can train in it, as far as this machine can tell. Takes seconds, mostly to import transformers.

    Raises: ManifestError when the model or the inner optimizer cannot be built. What only others need to have is worth
    no more than a warning.
    """
    from opendiloco.data.own_files import local_sources
    from opendiloco.data.tokenizer import build_tokenizer
    from opendiloco.errors import DataError
    from opendiloco.model.build import build_skeleton
    from opendiloco.training.optimizers import check_inner_optimizer

    check_inner_optimizer(config.inner_optimizer)
    momentum = config.outer_optimizer.momentum
    if config.codec.kind == "sparse" and momentum > 0:
        logger.warning("outer_optimizer.momentum = %g overshoots beside codec.kind = 'sparse'; make it 0", momentum)
    for part in beyond_schedules(config):
        logger.warning("%s; nothing is learned from there on. Lengthen the schedule, or shorten the run", part)
    for source in local_sources(config.data):
        if not Path(source).exists():
            logger.warning("data.source = %r is not on this machine; each volunteer names a folder with --data", source)
    if config.model.path is not None:
        return
    try:
        tokenizer = build_tokenizer(config.tokenizer)
    except DataError as error:
        logger.warning("the model is not checked: %s", error)
        return
    build_skeleton(config, tokenizer)


def beyond_schedules(config: RunConfig) -> Iterator[str]:
    """Yield where a learning rate is 0 long before the run ends: its schedule is over."""
    steps, inner_steps = config.total_outer_steps, config.training.inner_steps
    inner, outer = config.schedule, config.outer_optimizer.schedule
    if inner.total_steps is not None and inner.final_fraction == 0 and (steps - 1) * inner_steps >= inner.total_steps:
        yield f"schedule ends after {inner.total_steps:,} inner steps, and the run after {steps * inner_steps:,}"
    if outer and outer.total_steps is not None and outer.final_fraction == 0 and steps > outer.total_steps:
        yield f"outer_optimizer.schedule ends after {outer.total_steps:,} outer steps, and the run after {steps:,}"


def with_tokenizer_named(config: RunConfig) -> RunConfig:
    """With the digest of the tokenizer, if that comes from elsewhere and is to be had on this machine.

    Raises: MachineError when the run names another digest.
    """
    from opendiloco.data.tokenizer import build_tokenizer, digest_of_tokenizer
    from opendiloco.errors import DataError

    section = config.tokenizer
    if section.path is None:
        return config
    try:
        digest = digest_of_tokenizer(build_tokenizer(section))
    except DataError as error:
        lacking = "is not held against its digest" if section.digest else "gets no digest to hold volunteers' against"
        logger.warning("the tokenizer %s: %s", lacking, error)
        return config
    return config.model_copy(update={"tokenizer": section.model_copy(update={"digest": digest})})


def with_tokens_named(config: RunConfig) -> RunConfig:
    """With the digest of each source that is a folder of tokens, so that all peers read the same.

    Raises: DataError when the run names another digest, or a folder cannot be read.
    """
    from opendiloco.data.token_files import is_token_folder, read_about
    from opendiloco.errors import DataError

    sources = []
    for section in config.data.all_sources:
        if is_token_folder(section.source):
            digest = read_about(Path(section.source)).digest
            if section.digest not in (None, digest):
                raise DataError(
                    f"the run's data.digest is {section.digest}; the tokens of {section.source!r} have {digest}.",
                    "Get the tokens that the run means, or leave out data.digest.",
                )
            section = section.model_copy(update={"digest": digest})
        sources.append(section)
    if all(section.digest is None for section in sources):
        return config
    return config.model_copy(update={"data": config.data.with_sources(tuple(sources))})


def with_weights_named(config: RunConfig) -> RunConfig:
    """With the digest of the weights that a run begins with, if these come from elsewhere. Takes the memory that the
    model does.

    Raises: MachineError when the run names another digest; ManifestError and DataError: see `initial_theta`.
    """
    section = config.model
    if section.path is None and section.digest is None:
        return config
    from opendiloco.model.build import initial_theta
    from opendiloco.model.initial_weights import check_initial_weights, digest_of_weights

    theta = initial_theta(config)
    if section.digest is None:
        section = section.model_copy(update={"digest": digest_of_weights(theta)})
    check_initial_weights(theta, section)
    return config.model_copy(update={"model": section})


def with_held_out_text_named(config: RunConfig) -> RunConfig:
    """With the digest of what evaluation reads, if it is in folders that each volunteer names, and on this machine.

    A peer whose folder has other text keeps the losses that it finds to itself. Raises: DataError when the run names
    another digest; MachineError without memory for the tokens.
    """
    from opendiloco.data.own_files import local_sources
    from opendiloco.data.tokenizer import build_tokenizer
    from opendiloco.data.training_data import load_data
    from opendiloco.errors import DataError

    section, folders = config.evaluation, local_sources(config.data)
    if not section.every or not folders:
        return config
    if not all(Path(folder).exists() for folder in folders):
        if section.digest is None and any(source.digest is None for source in config.data.all_sources):
            logger.warning(
                "nothing says which text is held out, since it is not on this machine: volunteers keep their held-out "
                "losses to themselves. Create the run where the text is, or give evaluation.digest."
            )
        return config
    try:
        held_out = load_data(config, build_tokenizer(config.tokenizer)).held_out
    except DataError as error:
        logger.warning("the held-out text gets no digest to hold volunteers' against: %s", error)
        return config
    digest = held_out.digest(section.windows)
    if section.digest not in (None, digest):
        raise DataError(
            f"the run's held-out text has the digest {section.digest}; that of {', '.join(folders)} has {digest}.",
            "Get the text that the run means, or leave out evaluation.digest.",
        )
    return config.model_copy(update={"evaluation": section.model_copy(update={"digest": digest})})
