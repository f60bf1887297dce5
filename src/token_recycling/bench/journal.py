"""The journal of a run: a line per answered question, and what a continued run starts from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from skinny_kernels.errors import one_line
from token_recycling.bench.measures import Record
from token_recycling.bench.suites import Question
from token_recycling.errors import TokenRecyclingError
from token_recycling.util.files import make_folder, write_tensors, write_text

QUESTIONS, STATE = "questions.jsonl", "state.safetensors"
SAVED_EVERY = 300.0  # seconds
States = dict[str, dict[str, Tensor]]  # by decoder, what it has learnt from text


class Journal:
    """Writes what a run has measured as it goes.

    ``questions.jsonl`` gets every record at once. ``state.safetensors`` gets what the decoders have
    learnt, every five minutes and when a run is interrupted; it is there as long as the run can be
    continued, which then begins with the first question that the state does not cover.

    Attributes:
        folder: of the run.
        run: what must be the same in a continued run.
        about: added to every record.
        records: of the questions answered so far.
        states: of the decoders after these questions; empty before the first.
    """

    def __init__(
        self,
        folder: Path,
        questions: Sequence[Question],
        decoders: Sequence[str],
        settings: dict[str, Any],
        model: dict[str, Any],
        machine: dict[str, Any],
    ) -> None:
        """Begin a run in ``folder``, or continue the one that was interrupted there.

        Args:
            folder: new, empty, or of an interrupted run.
            questions: that it asks.
            decoders: names of all decoders.
            settings: of the run.
            model: see ``summary.describe_model``.
            machine: see ``machine.describe``.

        Raises:
            TokenRecyclingError: the folder holds something else, another run, or cannot be written.
        """
        turns = json.dumps([[question.name, question.turns] for question in questions])
        versions = {name: machine[name] for name in ("token_recycling", "torch", "transformers")}
        run = {
            "settings": settings,
            "decoders": decoders,
            "questions": hashlib.sha256(turns.encode()).hexdigest()[:16],
            "model": model,
            "versions": versions,
            "machine": {name: machine[name] for name in ("device_name", "threads")},
        }
        self.folder, self.run = folder, json.loads(json.dumps(run))
        self.about = {
            "asked": len(questions),
            "checksum": run["questions"],
            "versions": " ".join(f"{name}=={version}" for name, version in versions.items()),
            "command": machine["command"],
        }
        self.records: list[Record] = []
        self.states: States = {}
        self._saved = -SAVED_EVERY
        make_folder(folder)
        if (folder / STATE).exists():
            self._continue()
        elif any(folder.iterdir()):
            raise TokenRecyclingError(f"{folder} is not empty; choose a new folder")

    def _continue(self) -> None:
        try:
            with safe_open(self.folder / STATE, "pt") as file:
                about = file.metadata()
                for key in file.keys():  # noqa: SIM118, it is no dict
                    name, _, tensor = key.rpartition("/")
                    self.states.setdefault(name, {})[tensor] = file.get_tensor(key)
            before, count = json.loads(about["run"]), int(about["questions"])
        except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
            reason = one_line(error, 100)
            raise TokenRecyclingError(f"cannot continue {self.folder}: {reason}") from error
        if different := _difference(before, self.run):
            raise TokenRecyclingError(
                f"{self.folder} holds an interrupted run with {different}; repeat its command or "
                "choose a new folder"
            )
        lines = _lines(self.folder / QUESTIONS)[:count]
        if len(lines) < count:
            raise TokenRecyclingError(f"cannot continue {self.folder}: {QUESTIONS} is too short")
        self.records = [json.loads(line) for line in lines]
        write_text(self.folder / QUESTIONS, "".join(line + "\n" for line in lines))

    def add(self, record: Record, states: States) -> None:
        """Write a record; ``states`` are those of the decoders after its question."""
        record |= self.about
        with (self.folder / QUESTIONS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.records.append(record)
        self.states = states
        if monotonic() - self._saved > SAVED_EVERY:
            self.save()

    def save(self) -> None:
        """Write what a continued run starts from."""
        tensors = {
            f"{name}/{key}": t for name, one in self.states.items() for key, t in one.items()
        }
        about = {"run": json.dumps(self.run), "questions": str(len(self.records))}
        write_tensors(self.folder / STATE, tensors, about)
        self._saved = monotonic()

    def finish(self) -> None:
        """Remove what a continued run would start from."""
        (self.folder / STATE).unlink(missing_ok=True)


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Return the first value that differs, with its names, or None."""
    for key, value in now.items():
        was = before.get(key)
        if isinstance(value, dict) and isinstance(was, dict):
            if inner := _difference(was, value):
                return f"{key}: {inner}"
        elif was != value:
            return f"{key} {was}, not {value}"
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise TokenRecyclingError(f"cannot read {path}: {one_line(error, 100)}") from error


def read(folder: Path) -> list[Record]:
    """Return the records of a run.

    Raises:
        TokenRecyclingError: ``folder`` holds none.
    """
    path = folder / QUESTIONS
    if not path.is_file():
        raise TokenRecyclingError(f"{folder} is no folder of a benchmark: it has no {QUESTIONS}")
    try:
        records = [json.loads(line) for line in _lines(path)]
        found = bool(records) and all("variants" in record for record in records)
    except (ValueError, TypeError) as error:
        raise TokenRecyclingError(f"{path} is damaged: {one_line(error, 100)}") from error
    if not found:
        raise TokenRecyclingError(f"{path} has no answered questions")
    return records
