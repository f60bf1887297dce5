"""Saving of what a server has learned: every few minutes, and when its process ends."""

from __future__ import annotations

import atexit
import logging
from pathlib import Path
from threading import Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.errors import TokenRecyclingError

if TYPE_CHECKING:
    from token_recycling.drafting.device import DeviceMatrix

logger = logging.getLogger(__name__)


class MatrixKeeper:
    """Writes a matrix to a file while a server learns into it."""

    def __init__(
        self, matrix: AdjacencyMatrix | DeviceMatrix, path: str | Path, minutes: float
    ) -> None:
        """Save at the end of the process, and in ``tick`` at an interval of minutes.

        Args:
            matrix: that the server learns into.
            path: written atomically; a failure is logged and does not stop the server.
            minutes: between two saves.
        """
        self.matrix, self.path, self.seconds = matrix, Path(path), 60 * minutes
        self._saved = monotonic()
        self._writing = Lock()
        atexit.register(self.save)

    def tick(self) -> None:
        """Save if it is time: copy the matrix now, and write the copy in a thread."""
        if monotonic() - self._saved < self.seconds:
            return
        self._saved = monotonic()
        Thread(target=self._write, args=(self.matrix.clone(),), daemon=True).start()

    def save(self) -> bool:
        """Save now; return whether that succeeded."""
        return self._write(self.matrix)

    def finish(self) -> bool:
        """Save for the last time, and not at the end of the process; return as ``save`` does."""
        atexit.unregister(self.save)
        return self.save()

    def _write(self, matrix: Any) -> bool:
        with self._writing:
            try:
                matrix.save(self.path)
            except TokenRecyclingError as error:
                logger.warning("Token Recycling: the matrix was not saved: %s", error)
                return False
            return True
