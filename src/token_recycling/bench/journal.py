"""Folder of a benchmark run: its plan, one line per finished question, and the state to resume.

A question is finished when its line in ``journal.jsonl`` is complete. The state after the question
is written before that line, so a run that was killed at any point can be resumed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from token_recycling.errors import TokenRecyclingError
from token_recycling.util.files import make_folder, write_tensors, write_text

State = Mapping[str, Mapping[str, Tensor]]  # by variant (see ``Decoder.state``)


class Journal:
    """The finished questions of a run, stored in a folder."""

    def __init__(self, folder: Path, plan: dict[str, Any], *, resume: bool) -> None:
        """Start a run in ``folder``, or resume the one stored there.

        Raises:
            TokenRecyclingError: the folder holds a run and ``resume`` is not set, that run has a
                different plan, or the folder cannot be used.
        """
        self.folder = folder
        self._plan, self._lines = folder / "plan.json", folder / "journal.jsonl"
        plan = json.loads(json.dumps(plan))
        make_folder(folder)
        before = self._before()
        self.records = self._read()
        if before is None:
            unknown = any(folder.iterdir())
        else:  # a plan.json of another program has different keys
            unknown = not self.records and before.keys() != plan.keys()
        if unknown:
            raise TokenRecyclingError(f"{folder} contains other files; choose a new folder")
        if not self.records:  # a run without any answer may be overwritten
            write_text(self._plan, json.dumps(plan, indent=1) + "\n")
        elif not resume:
            raise TokenRecyclingError(
                f"{folder} contains a run; continue it with --resume or choose another folder"
            )
        else:
            self._compare(before or {}, plan)
        self._begun_as = self._plan.read_bytes()

    def _before(self) -> dict[str, Any] | None:
        """Return the stored plan, or None if there is none."""
        if not self._plan.is_file():
            return None
        try:
            return dict(json.loads(self._plan.read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise TokenRecyclingError(f"{self._plan} cannot be read: {error}") from error

    def _compare(self, before: dict[str, Any], plan: dict[str, Any]) -> None:
        """Raise if the stored plan differs from the new one."""
        differ = [name for name in {**before, **plan} if before.get(name) != plan.get(name)]
        if differ:
            raise TokenRecyclingError(
                f"the run in {self.folder} differs in {', '.join(differ).replace('_', ' ')}; "
                "use the options of that run or choose another folder"
            )

    def _read(self) -> list[dict[str, Any]]:
        """Read the complete lines; an incomplete last line is ignored."""
        raw = self._lines.read_bytes() if self._lines.is_file() else b""
        self._size, self._whole = len(raw), raw.rfind(b"\n") + 1
        try:
            return [dict(json.loads(line)) for line in raw[: self._whole].splitlines()]
        except (ValueError, TypeError) as error:
            raise TokenRecyclingError(f"{self._lines} is damaged: {error}") from error

    def _state(self, done: int) -> Path:
        return self.folder / f"state-{done}.safetensors"

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state after the last finished question; empty before the first.

        Raises:
            TokenRecyclingError: its file is missing or damaged.
        """
        if not self.records:
            return {}
        path = self._state(len(self.records))
        found: dict[str, dict[str, Tensor]] = {}
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    name, _, part = key.rpartition("/")
                    found.setdefault(name, {})[part] = file.get_tensor(key).clone()
        except (SafetensorError, OSError) as error:
            raise TokenRecyclingError(f"{path} cannot be read: {error}") from error
        return found

    def add(self, record: dict[str, Any], state: State) -> None:
        """Store a question's record and the state after it.

        Raises:
            TokenRecyclingError: they cannot be written, or another run writes to this folder.
        """
        self._check_alone()
        tensors = {
            f"{name}/{part}": t for name, parts in state.items() for part, t in parts.items()
        }

        kept = self._state(len(self.records) + 1)
        write_tensors(kept, tensors)
        line = json.dumps(record).encode() + b"\n"
        try:
            with self._lines.open("ab") as file:
                file.truncate(self._whole)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise TokenRecyclingError(f"cannot write {self._lines}: {error.strerror}") from error
        self._size = self._whole = self._whole + len(line)
        self.records.append(record)
        self._drop_states(but=kept)

    def finish(self) -> None:
        """Remove the state: nothing is left to resume."""
        self._drop_states()

    def _drop_states(self, but: Path | None = None) -> None:
        for old in self.folder.glob("state-*"):  # including leftovers of a killed run
            if old != but:
                old.unlink(missing_ok=True)

    def _check_alone(self) -> None:
        """Raise if another run has written to the folder since this one started."""
        size = self._lines.stat().st_size if self._lines.is_file() else 0
        if size != self._size or self._plan.read_bytes() != self._begun_as:
            raise TokenRecyclingError(f"another run is writing to {self.folder}; this run stops")
