"""Warm rows, and their files in the cache folder."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.drafting.matrix_file import MatrixFile
from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.util.files import cache_folder, make_folder, write_text
from token_recycling.warm.context import NOTHING, WarmPrefix
from token_recycling.warm.identity import checkpoint_folder, checkpoint_name

ALIAS_FORMAT = "token-recycling-rows-alias-1"
KEEP_SECONDS = 60.0  # of computation, after which the rows are written


@dataclass
class WarmRows:
    """What a matrix starts with, and how it was made.

    Attributes:
        rows: a matrix, on the CPU.
        context: what was in front of each token; None if it has not been chosen yet.
        name: see ``identity.weights_name``; None if the weights cannot be identified.
        complete: every token of the vocabulary was tried.
        questions: answered to teach the matrix.
        answered: tokens of these answers.
        path: the file; None if the rows are in none.
        unkept: why they could not be written; None if they are.
        computed: rows computed by the last call of ``warm_up``; the others existed before.
        failed: the model failed; nothing more is computed.
        seconds: time taken by the last computation, 0.0 if there was none.
        saved: rows in the file.
        saved_at: when it was written, by ``perf_counter``; 0.0 if not by this object.
    """

    rows: AdjacencyMatrix
    context: WarmPrefix | None
    name: str | None
    complete: bool = False
    questions: int = 0
    answered: int = 0
    path: Path | None = None
    unkept: str | None = None
    computed: int = 0
    failed: bool = False
    seconds: float = 0.0
    saved: int = 0
    saved_at: float = 0.0

    @property
    def is_due(self) -> bool:
        """True if there are rows to write, and all are there or the last time was a while ago."""
        late = self.complete or perf_counter() - self.saved_at > KEEP_SECONDS
        return late and self.rows.rows_seen > self.saved

    @property
    def line(self) -> str:
        """What was done, as one line."""
        kept = f"kept in {self.path}" if self.path else f"not kept ({self.unkept})"
        front = "" if self.context in (None, NOTHING) else f", context {self.context.name}"
        taught = f", taught by {self.answered:,} tokens of answers" if self.answered else ""
        return (
            f"warm rows: {self.rows.rows_seen:,} of {self.rows.vocab_size:,} tokens"
            f"{front}, {self.computed:,} computed in {self.seconds:.1f} s{taught}, {kept}"
        )

    def keep_new(self, model: Any) -> None:
        """Call ``keep`` if there are rows that are not in the file."""
        if self.rows.rows_seen > self.saved:
            self.keep(model)

    def keep(self, model: Any) -> None:
        """Write the rows of ``model`` to the cache folder; set ``path`` or ``unkept``."""
        self.saved, self.saved_at = self.rows.rows_seen, perf_counter()
        if self.name is None:
            self.unkept = "the weights cannot be identified"
            return
        context = self.context or NOTHING
        about = {
            "context": context.name,
            "context_tokens": json.dumps(context.tokens),
            "complete": json.dumps(self.complete),
            "questions": json.dumps(self.questions),
            "answered": json.dumps(self.answered),
        }
        try:
            path = _folder() / f"{self.name}-k{self.rows.k}.safetensors"
            make_folder(_folder())
            self.rows.save(path, about)
            self.path = path
            keep_alias(model, self.name)
            self.unkept = None
        except TokenRecyclingError as error:
            self.path, self.unkept = None, str(error)


def find(name: str, vocab_size: int, k: int, fingerprint: str = "") -> WarmRows | None:
    """Return the kept rows with the most tokens and ``k`` candidates or more, cut to ``k``.

    A file that cannot be used gives a warning and is ignored.

    Args:
        name: a result of ``identity.weights_name``.
        vocab_size: of the model.
        k: candidates per token.
        fingerprint: of the model's tokenizer, for the matrix.
    """
    found: list[WarmRows] = []
    for path in sorted(_folder().glob(f"{name}-k*.safetensors")):
        width = path.stem.rpartition("-k")[2]
        if not (width.isdecimal() and int(width) >= k):
            continue
        try:
            found.append(_load(path, vocab_size, k, fingerprint))
        except TokenRecyclingError as error:
            warnings.warn(f"warm rows are ignored: {error}", stacklevel=2)

    def most(one: WarmRows) -> Any:
        return one.complete, one.answered, one.rows.rows_seen

    return max(found, key=most, default=None)


def keep_alias(model: Any, name: str) -> None:
    """Make the rows of ``name`` available to engines that load the checkpoint of ``model``.

    Nothing is written for a model that was not loaded from files.

    Raises:
        TokenRecyclingError: the file cannot be written.
    """
    config = model.config
    source = getattr(config, "_name_or_path", "")
    path = _alias_path(source, getattr(config, "_commit_hash", None))
    if path is None:
        return
    text = json.dumps({"format": ALIAS_FORMAT, "rows": name}) + "\n"
    try:
        if path.read_text("utf-8") == text:
            return
    except (OSError, ValueError):  # missing or damaged
        pass
    make_folder(_folder())
    write_text(path, text)


def find_by_files(
    source: str, revision: str | None, vocab_size: int, k: int, fingerprint: str = ""
) -> WarmRows | None:
    """Return the kept rows of a checkpoint, without loading it (see ``find``).

    Args:
        source: a folder or a Hub name.
        revision: of a Hub name; None: the main branch.
        vocab_size: of the model.
        k: candidates per token.
        fingerprint: of the model's tokenizer, for the matrix.
    """
    path = _alias_path(source, revision)
    if path is None or not path.is_file():
        return None
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["format"] != ALIAS_FORMAT or not isinstance(data["rows"], str):
            raise ValueError("another format")
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        warnings.warn(f"warm rows are ignored: {path}: {one_line(error, 80)}", stacklevel=2)
        return None
    return find(data["rows"], vocab_size, k, fingerprint)


def _alias_path(source: str, revision: str | None) -> Path | None:
    """Return the path of the alias for a checkpoint; None if it has no files here."""
    name = checkpoint_name(checkpoint_folder(source, revision))
    return None if name is None else _folder() / f"alias-{name}.json"


def _folder() -> Path:
    return cache_folder() / "rows"


def _load(path: Path, vocab_size: int, k: int, fingerprint: str) -> WarmRows:
    """Read a file and cut its rows to ``k`` candidates.

    Raises:
        TokenRecyclingError: the file is damaged, or belongs to another vocabulary.
    """
    file = MatrixFile.read(path)
    try:
        context = WarmPrefix(
            file.about["context"], tuple(map(int, json.loads(file.about["context_tokens"])))
        )
        complete = json.loads(file.about["complete"]) is True
        questions, answered = (int(file.about[name]) for name in ("questions", "answered"))
        if not all(0 <= token < vocab_size for token in context.tokens):
            raise ValueError("context outside the vocabulary")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise TokenRecyclingError(f"{path} is damaged ({one_line(error, 80)})") from error
    rows = AdjacencyMatrix.of(file)
    rows.check(vocab_size, "", what="this model")
    # Not compared: ids depend on the weights, which another tokenizer does not change.
    rows.fingerprint = fingerprint
    rows = rows.cut(k)
    name, seen = path.stem.rpartition("-k")[0], rows.rows_seen
    return WarmRows(rows, context, name, complete, questions, answered, path, saved=seen)
