"""Benchmark questions: loading suites from files and selecting questions."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from os.path import expanduser
from pathlib import Path
from typing import Any

from token_recycling.errors import TokenRecyclingError

BUILTIN = Path(__file__).parent / "suites" / "builtin.jsonl"
PUBLIC = ("spec-bench", "mbpp", "gsm8k")  # known by name, but not included in the package
# MT-bench categories in Spec-Bench, which reports them as a single one.
MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
# Accepted keys for a line's turns, and the type of their value.
TURNS: dict[str, tuple[type, str]] = {
    "turns": (list, "a list of strings"),
    "prompt": (str, "a string"),
    "question": (str, "a string"),
}


@dataclass(frozen=True)
class Question:
    """The user's turns of a conversation."""

    suite: str
    id: str  # unique within the suite
    kind: str  # the report groups by it
    category: str  # as given in the file
    turns: tuple[str, ...]

    @property
    def name(self) -> str:
        """The question's unique name, ``suite/id``."""
        return f"{self.suite}/{self.id}"


def load_all(suites: Iterable[str], per_kind: int | None = None) -> list[Question]:
    """Return the selected questions of several suites (see ``load`` and ``choose``).

    Raises:
        TokenRecyclingError: a suite cannot be loaded, or two of them have the same name.
    """
    questions: list[Question] = []
    for loaded in map(load, suites):
        name = loaded[0].suite
        if name in {question.suite for question in questions}:
            raise TokenRecyclingError(f"two suites are called {name}; remove or rename one")
        questions += loaded
    return choose(questions, per_kind)


def load(suite: str) -> list[Question]:
    """Return the questions of a suite in file order, at least one.

    Args:
        suite: ``builtin``, ``NAME=PATH`` for a public suite (spec-bench, mbpp, gsm8k), or the path
            of a JSONL file, whose stem becomes the suite's name. Each line holds ``turns`` (a
            list), ``prompt`` or ``question``, and optionally ``question_id`` or ``id`` (default:
            the line number) and ``category`` or ``kind`` (default: the suite's name).

    Raises:
        TokenRecyclingError: there is no such suite, its file cannot be read, or a line is invalid.
    """
    if suite == "builtin":
        return _read(suite, BUILTIN)
    name, _, path = suite.partition("=")
    if name not in PUBLIC:
        return _read(Path(suite).stem, Path(expanduser(suite)))
    if not path:
        raise TokenRecyclingError(
            f"{name} is not included; write {name}=PATH with the path of its JSONL file"
        )
    return _read(name, Path(expanduser(path)))  # the shell does not expand ~ after =


def choose(questions: Iterable[Question], per_kind: int | None = None) -> list[Question]:
    """Return at most ``per_kind`` questions of every kind in a suite, alternating between kinds.

    They are spread evenly over the questions of their kind, beginning with the first; None takes
    all. Because the kinds alternate, a run that is cut short covers all of them.

    Raises:
        TokenRecyclingError: ``per_kind`` is below 1.
    """
    if per_kind is not None and per_kind < 1:
        raise TokenRecyclingError(
            f"the number of questions per kind is {per_kind}; it must be 1 or more"
        )
    kinds: dict[tuple[str, str], list[Question]] = {}
    for question in questions:
        kinds.setdefault((question.suite, question.kind), []).append(question)
    chosen = []
    for group in kinds.values():
        count = min(per_kind or len(group), len(group))
        chosen.append([group[i * len(group) // count] for i in range(count)])
    return [question for turn in zip_longest(*chosen) for question in turn if question is not None]


def _read(suite: str, path: Path) -> list[Question]:
    """Read the questions of a file; errors name the line."""
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise TokenRecyclingError(
            f"cannot read {path}: {error.strerror}; a suite is builtin, "
            f"{', '.join(f'{name}=PATH' for name in PUBLIC)} or the path of a JSONL file"
        ) from error
    questions: dict[str, Question] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question = _question(suite, number, line)
            if question.id in questions:
                raise TokenRecyclingError(f"the id {question.id} is used twice")
        except TokenRecyclingError as error:
            raise TokenRecyclingError(f"{path}, line {number}: {error}") from error
        questions[question.id] = question
    if not questions:
        raise TokenRecyclingError(f"{path} contains no questions")
    return list(questions.values())


def _question(suite: str, number: int, line: bytes) -> Question:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise TokenRecyclingError("not valid UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise TokenRecyclingError(f"invalid JSON ({error})") from error
    if not isinstance(row, dict):
        raise TokenRecyclingError("not a JSON object; a suite file has one object per line")
    if "messages" in row:
        raise TokenRecyclingError('"messages" is not supported; put the user messages into "turns"')
    keys = [key for key in TURNS if key in row]
    if len(keys) != 1:
        raise TokenRecyclingError(f"expected exactly one of {', '.join(TURNS)}; found {len(keys)}")
    turns = _texts(row, keys[0])
    category = _label(row, "category", "kind", default=suite)
    kind = "mt_bench" if suite == "spec-bench" and category in MT_BENCH else category
    identity = _label(row, "question_id", "id", default=str(number))
    return Question(suite, identity, kind, category, turns)


def _texts(row: dict[str, Any], key: str) -> tuple[str, ...]:
    """Return a text or a list of texts as a tuple; raise if it is empty or one is blank."""
    value, (form, expected) = row[key], TURNS[key]
    texts = [value] if isinstance(value, str) else value
    if not isinstance(value, form) or not all(isinstance(text, str) for text in texts):
        raise TokenRecyclingError(f'"{key}" must be {expected}')
    if not texts or not all(text.strip() for text in texts):
        raise TokenRecyclingError(f'"{key}" must not be empty')
    if any("\ud800" <= char <= "\udfff" for text in texts for char in text):
        raise TokenRecyclingError(f'"{key}" contains an unpaired surrogate')
    return tuple(texts)


def _label(row: dict[str, Any], *keys: str, default: str) -> str:
    """Return the value of the first key present, as one line of text."""
    for key in keys:
        if key in row:
            value = row[key]
            label = str(value) if type(value) in (int, str) else ""
            if not label.strip() or not label.isprintable():
                raise TokenRecyclingError(f'"{key}" must be an integer or one line of text')
            return label
    return default
