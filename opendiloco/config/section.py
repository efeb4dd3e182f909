"""The base of all tables of `run.toml`: strict sections, types with bounds, and error messages."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from peers.errors import ManifestError
from peers.values.identity import is_peer_id
from peers.values.wire import printable


def _check_digest(value: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", value):
        raise PydanticCustomError("digest", "not 64 hexadecimal digits in lower case")
    return value


def _check_peer_id(value: str) -> str:
    if not is_peer_id(value):
        raise PydanticCustomError("peer_id", "not a peer id")
    return value


def _check_words(value: str) -> str:
    if not value.isprintable():
        raise PydanticCustomError("words", "has line breaks or control characters")
    return value


def _check_link(value: str) -> str:
    if not re.fullmatch(r"https?://[!-~]+", value):
        raise PydanticCustomError("link", "not the address of a web page")
    return value


# A manifest may come from a stranger. The bounds are far above any sensible value, and keep every number computed from
# them within the range of the wire format, fp32 and the clocks.
LARGEST_NUMBER = 1e30
VALUES_LIMIT = 10**12  # largest number of values (parameters) that a model may have
Positive = Annotated[int, Field(ge=1, le=1_000_000)]
StepCount = Annotated[int, Field(ge=0, le=10**9)]
ValueCount = Annotated[int, Field(ge=1, le=VALUES_LIMIT)]
TokenCount = Annotated[int, Field(ge=0, le=10**15)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Field(ge=1e-30, le=LARGEST_NUMBER)]
NotNegativeFloat = Annotated[float, Field(ge=0, le=LARGEST_NUMBER)]
Seconds = Annotated[float, Field(ge=0.1, le=86_400)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1)]
Words = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_check_words)]
Link = Annotated[str, Field(max_length=500), AfterValidator(_check_link)]
# The reference page of `run.toml` shows the `format` that each of the JSON schemas below names.
Digest = Annotated[str, AfterValidator(_check_digest), WithJsonSchema({"type": "string", "format": "digest"})]
PeerName = Annotated[str, AfterValidator(_check_peer_id), WithJsonSchema({"type": "string", "format": "peer id"})]


class Section(BaseModel):
    """One table of `run.toml`: no unknown keys, no silent conversions, no changes afterwards.

    docs/manifest.md is made from the docstrings of the tables and of their keys.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


# Mistakes -------------------------------------------------------------------------------------------------------------
# Errors of pydantic and tomllib become lines that name the field, the value and the remedy.

LONGEST_VALUE = 60  # characters shown of a wrong value, so that the error fits on one line
PROBLEMS_LIMIT = 20  # most problems shown, because a stranger's file may have thousands
REMEDIES = {
    "greater_than": "too small. Use a number above {gt}.",
    "greater_than_equal": "too small. Use {ge} or more.",
    "less_than": "too large. Use a number below {lt}.",
    "less_than_equal": "too large. Use {le} or less.",
    "int_type": "not a whole number. Use one, without quotes or decimals.",
    "float_type": "not a number. Use one, without quotes.",
    "finite_number": "not finite. Use a finite number.",
    "string_type": "not a text. Put it in quotes.",
    "string_too_short": "empty. Give a text.",
    "string_too_long": "too long. Use at most {max_length} characters.",
    "literal_error": "not known here. Use {expected}.",
    "string_pattern_mismatch": "not usable. Use 1 to 40 lower-case letters, digits and dashes.",
    "model_type": "not a table. Write its keys below a line [{path}].",
    "model_attributes_type": "not a table. Write its keys below a line [{path}].",
    "dict_type": "not a table. Write its keys below a line [{path}].",
    "bool_type": "neither true nor false. Write one of these, without quotes.",
    "too_short": "too few. Give at least {min_length}.",
    "too_long": "too many. Give at most {max_length}.",
    "words": "has line breaks or control characters. Write it in one line.",
    "link": "not the address of a web page. Use one such as https://example.org/run.",
    "peer_id": "not the peer id of an Ed25519 key. Use one as `diloco-peer bootstrap` prints it: 12D3KooW….",
    "tuple_type": "not a list. Write its values between square brackets.",
}
"""Problem and remedy by pydantic's name for the problem; fields in braces come from pydantic's context."""


def read_toml(path: Path, remedy: str) -> dict[str, Any]:
    """Return the content of a TOML file. Raises: ManifestError, with this `remedy` if the file cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read ({error.strerror}).", remedy) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: not valid TOML: {error}.", "Correct the syntax there.") from None


def describe_validation_error(origin: str, error: ValidationError, model: type[BaseModel]) -> str:
    """Return `error` as text for people: one line for each problem, with its remedy."""
    found = error.errors()
    # pydantic also reports a list with wrong elements as too short; that problem is dropped, because it would mislead.
    inner = {problem["loc"][:-1] for problem in found}
    problems = [each for each in found if each["type"] != "too_short" or each["loc"] not in inner]
    lines = [_line(problem, model) for problem in problems[:PROBLEMS_LIMIT]]
    if len(lines) == 1:
        return f"{origin}: {lines[0]}"
    return f"{origin}: {len(problems)} problems:\n" + "\n".join(f"  {line}" for line in lines)


def _line(problem: Any, model: type[BaseModel]) -> str:
    keys, _ = _resolve(model, problem["loc"])
    path = printable(".".join(keys))  # a key in a stranger's file may have line breaks
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "value_error":
        return f"{path}: {context['error']}." if path else f"{context['error']}."
    if kind == "missing":
        return f"{path}: is missing. Add it."
    if kind == "union_tag_invalid":
        return f"{path}.kind = {_shown(context['tag'])}: not known here. Use {context['expected_tags']}."
    given = f"{path} = {_shown(problem['input'])}"
    if kind == "extra_forbidden":
        _, table = _resolve(model, problem["loc"][:-1])
        known = list(table.model_fields) if table else []
        close = difflib.get_close_matches(keys[-1], known, n=1, cutoff=0.5)
        remedy = f"Did you mean {close[0]}?" if close else f"Remove it; known here: {', '.join(known)}."
        return f"{given}: unknown key. {remedy}"
    if kind in REMEDIES:
        return f"{given}: {REMEDIES[kind].format_map(context | {'path': path})}"
    return f"{given}: {problem['msg']}. Correct it."


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def _resolve(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[str], type[BaseModel] | None]:
    """Return the keys that lead to the place `location` in the file, and the table there (None: no table).

    For a table with several kinds, pydantic's location also contains the kind, which is no key of the file.
    """
    keys: list[str] = []
    table: type[BaseModel] | None = model
    kinds: dict[int | str, type[BaseModel]] = {}
    for step in location:
        if step in kinds:
            table, kinds = kinds[step], {}
            continue
        keys.append(str(step))
        if isinstance(step, int):  # an index of a list, whose elements may be tables
            continue
        field = table.model_fields.get(step) if table else None
        tables = list(models_in(field.annotation)) if field else []
        table = tables[0] if tables else None
        kinds = {each.model_fields["kind"].default: each for each in tables} if len(tables) > 1 else {}
    return keys, table


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield all pydantic models in a type annotation, also those inside a list or union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)
