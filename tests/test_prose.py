"""The project's words: plain sentences, one name for one thing, and docs that can be read in an evening."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.house import tree_of
from tests.test_layering import ROOT

CODE = [
    path
    for folder in ("opendiloco", "peers", "native", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
]
DOCS = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
QUESTION_WORDS = {"what", "how", "who", "whom", "whose", "where", "whether", "which", "when"}
MARKERS = re.compile(
    r"\b(whoever|whomever|whom|nobody|somebody|anybody|everybody|said|told|of which|what came|what comes|what becomes"
    r"|what it takes|lacks? of|is had|can't be had|cannot be had)\b",
    re.IGNORECASE,
)
"""Words that hide the actor of a sentence."""
MARKERS_AT_MOST = 39
WORDS_AT_MOST = 35_000
GLOSSARY_TERMS = re.compile(r"^- (\*\*.*?\*\*):", re.MULTILINE)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def first_word(text: str) -> str:
    return re.sub(r"\W", "", text.split()[0]).lower()


def test_a_docstring_begins_with_an_action_or_a_noun() -> None:
    """Not with a question word, after which a reader waits for the sentence."""
    found = [place for path in CODE for place, text in docstrings(path) if first_word(text) in QUESTION_WORDS]
    assert not found


def test_a_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for path in CODE:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_few_words_hide_the_actor() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in (*CODE, *DOCS)
        for match in MARKERS.finditer(path.read_text("utf-8"))
    ]
    assert len(found) <= MARKERS_AT_MOST, found


def test_the_docs_can_be_read_in_an_evening() -> None:
    assert sum(len(path.read_text("utf-8").split()) for path in DOCS) <= WORDS_AT_MOST


def glossary_terms() -> list[str]:
    page = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    return [term for terms in GLOSSARY_TERMS.findall(page) for term in re.findall(r"\*\*(.+?)\*\*", terms)]


def test_each_term_of_the_glossary_is_used_on_another_page_or_in_the_code() -> None:
    texts = [path.read_text("utf-8").lower() for path in (*CODE, *DOCS) if path.name != "glossary.md"]
    terms = glossary_terms()
    assert len(terms) > 30
    assert not [term for term in terms if not any(term.lower() in text for text in texts)]
