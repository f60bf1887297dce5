"""The adjacency matrix: for every token, the k tokens that the target last ranked highest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from token_recycling import defaults
from token_recycling.errors import TokenRecyclingError
from token_recycling.files import write_atomically

FORMAT = "token-recycling-matrix-1"
EMPTY = -1  # candidate of a row that was never seen


def fingerprint(tokenizer: Any, vocab_size: int) -> str:
    """Name a vocabulary: its size and a hash over the tokenizer's (token, id) pairs.

    A matrix holds token ids, so it means something only under the tokenizer that made it.
    ``tokenizer=None`` gives an empty name, which fits every tokenizer.
    """
    if tokenizer is None:
        return ""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
    return f"{vocab_size}-{digest[:16]}"


class AdjacencyMatrix:
    """``candidates`` int32 [V, k], best first, and ``probabilities`` float16 [V, k].

    A row never seen holds ``EMPTY`` throughout and proposes nothing. A probability of 0 means
    that it was not recorded (the paper's drafter keeps ids only).
    """

    def __init__(
        self,
        vocab_size: int,
        k: int = defaults.CANDIDATES,
        *,
        device: torch.device | str = "cpu",
        fingerprint: str = "",
    ) -> None:
        """Make an empty matrix.

        Raises:
            TokenRecyclingError: ``k`` is not within 1..``vocab_size``.
        """
        if not 1 <= k <= vocab_size:
            raise TokenRecyclingError(f"k is {k}; it must lie between 1 and {vocab_size}")
        self.vocab_size, self.k, self.fingerprint = vocab_size, k, fingerprint
        # Two rows more than the vocabulary keep shapes and indices free of special cases: token t
        # has row t + 1; row 0 belongs to EMPTY and stays empty; the last row takes what must not
        # be written.
        self._candidates = torch.full((vocab_size + 2, k), EMPTY, dtype=torch.int32, device=device)
        self._probabilities = torch.zeros((vocab_size + 2, k), dtype=torch.float16, device=device)

    @property
    def candidates(self) -> Tensor:
        """int32 [V, k], best first; ``EMPTY`` where nothing was seen."""
        return self._candidates[1:-1]

    @property
    def probabilities(self) -> Tensor:
        """float16 [V, k] within 0..1; 0 where not recorded."""
        return self._probabilities[1:-1]

    @property
    def device(self) -> torch.device:
        """Where the rows live."""
        return self._candidates.device

    @property
    def nbytes(self) -> int:
        """Bytes of the V rows: V · k · (4 + 2)."""
        return self.candidates.nbytes + self.probabilities.nbytes

    @property
    def rows_seen(self) -> int:
        """How many tokens have a row."""
        return int((self.candidates[:, 0] != EMPTY).sum())

    def to(self, device: torch.device | str) -> AdjacencyMatrix:
        """Move the rows to ``device`` in place; returns itself."""
        self._candidates = self._candidates.to(device)
        self._probabilities = self._probabilities.to(device)
        return self

    def reset(self) -> None:
        """Forget every row (cold start)."""
        self._candidates.fill_(EMPTY)
        self._probabilities.zero_()

    def copy_(self, other: AdjacencyMatrix) -> AdjacencyMatrix:
        """Take over the rows of ``other``, which must have the same V and k; returns itself."""
        self._candidates.copy_(other._candidates)
        self._probabilities.copy_(other._probabilities)
        return self

    def clone(self) -> AdjacencyMatrix:
        """Return an independent matrix with the same rows."""
        twin = AdjacencyMatrix(
            self.vocab_size, self.k, device=self.device, fingerprint=self.fingerprint
        )
        return twin.copy_(self)

    def seen(self, tokens: Tensor) -> Tensor:
        """Say which of ``tokens`` (int64, any shape) have a row: bool of the same shape."""
        return self.candidates[:, 0][tokens] != EMPTY

    def offsets(self, ranks: Tensor) -> Tensor:
        """Prepare candidate ranks (any shape, each below k) for ``lookup``: int32."""
        return (ranks + self.k).to(torch.int32)

    def lookup(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        """Return one candidate for each token.

        Args:
            tokens: int32 [B, m], ``EMPTY`` allowed.
            offsets: int32 [m], from ``offsets``: which candidate.

        Returns:
            int32 [B, m], ``EMPTY`` where there is none.
        """
        flat = torch.add(offsets, tokens, alpha=self.k)  # (token + 1) · k + rank
        return self._candidates.view(-1).index_select(0, flat.view(-1)).view(flat.shape)

    def update(
        self,
        tokens: Tensor,
        candidates: Tensor,
        probabilities: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> None:
        """Replace the rows of ``tokens``; of several rows for one token the last one stays.

        Args:
            tokens: int64 [n].
            candidates: [n, k] ids, best first.
            probabilities: [n, k], or None when they are not recorded.
            valid: bool [n]; entries that are False write nothing. None: all are valid.
        """
        rows = tokens + 1
        if valid is not None:
            rows = rows.masked_fill(~valid, self.vocab_size + 1)
        # Writing repeated indices has no defined winner on CUDA. Here every repetition writes the
        # row of the last one, so that the order of the writes does not matter.
        order = torch.arange(len(rows), device=rows.device)
        winners = rows.new_empty(self.vocab_size + 2)  # only the places written are read
        winners.scatter_reduce_(0, rows, order, "amax", include_self=False)
        last = winners[rows]
        self._candidates[rows] = candidates[last].to(torch.int32)
        if probabilities is None:
            self._probabilities.index_fill_(0, rows, 0.0)
        else:
            self._probabilities[rows] = probabilities[last].to(torch.float16)

    def _scores(self) -> Tensor:
        """float32 [V, k] to merge by: probabilities, or 2^-(rank+1) where none is recorded."""
        recorded = self.probabilities.float()
        by_rank = 0.5 ** torch.arange(1, self.k + 1, device=self.device)
        scores = torch.where(recorded.sum(dim=1, keepdim=True) > 0, recorded, by_rank)
        return scores.masked_fill(self.candidates == EMPTY, 0.0)

    def merge(self, other: AdjacencyMatrix) -> AdjacencyMatrix:
        """Return a new matrix with the rows of both.

        A row that only one has is taken as it is. Where both have one, the scores of equal
        candidates are added, the best k stay and recorded probabilities are averaged; on equal
        scores the first matrix wins.

        Raises:
            TokenRecyclingError: the two differ in vocabulary, tokenizer or k.
        """
        self._check_same(other.vocab_size, other.k, other.fingerprint, "the other matrix")
        ids = torch.cat([self.candidates, other.candidates.to(self.device)], dim=1)
        scores = torch.cat([self._scores(), other._scores().to(self.device)], dim=1)
        p = torch.cat([self.probabilities, other.probabilities.to(self.device)], dim=1).float()
        k = self.k
        match = (ids[:, :k, None] == ids[:, None, k:]) & (ids[:, :k, None] != EMPTY)
        scores[:, :k] += (match * scores[:, None, k:]).sum(dim=2)
        p[:, :k] += (match * p[:, None, k:]).sum(dim=2)
        repeated = match.any(dim=1)
        scores[:, k:].masked_fill_(repeated, -1.0)
        scores.masked_fill_(ids == EMPTY, -1.0)
        order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
        both = (self.candidates[:, :1] != EMPTY) & (ids[:, k : k + 1] != EMPTY)
        merged = AdjacencyMatrix(
            self.vocab_size, k, device=self.device, fingerprint=self.fingerprint
        )
        taken = scores.gather(1, order) >= 0
        merged.candidates.copy_(ids.gather(1, order).masked_fill(~taken, EMPTY))
        merged.probabilities.copy_(
            (p.gather(1, order) * torch.where(both, 0.5, 1.0)).masked_fill(~taken, 0.0)
        )
        return merged

    def save(self, path: str | Path) -> None:
        """Write the matrix as safetensors; the file appears whole or not at all.

        Raises:
            TokenRecyclingError: the file cannot be written.
        """
        tensors = {
            "candidates": self.candidates.cpu().contiguous(),
            "probabilities": self.probabilities.cpu().contiguous(),
        }
        about = {"format": FORMAT, "fingerprint": self.fingerprint}

        def write(partial: Path) -> None:
            try:
                save_file(tensors, partial, metadata=about)
            except SafetensorError as error:
                raise OSError(str(error)) from error

        write_atomically(Path(path), write)

    @classmethod
    def load(cls, path: str | Path, *, device: torch.device | str = "cpu") -> AdjacencyMatrix:
        """Read what ``save`` wrote.

        Raises:
            TokenRecyclingError: the file is missing, damaged or no matrix.
        """
        path = Path(path)
        if not path.is_file():
            raise TokenRecyclingError(f"no matrix file at {path}")
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise TokenRecyclingError(
                f"{path} is damaged or no matrix file ({error}); delete it or save it again"
            ) from error
        ids, p = found.get("candidates"), found.get("probabilities")
        if (
            about.get("format") != FORMAT
            or ids is None
            or p is None
            or (ids.dtype, p.dtype) != (torch.int32, torch.float16)
            or ids.ndim != 2
            or ids.shape != p.shape
        ):
            raise TokenRecyclingError(f"{path} is no matrix of this program ({FORMAT})")
        if bool(((ids < EMPTY) | (ids >= len(ids))).any()):
            raise TokenRecyclingError(f"{path} holds candidates outside its vocabulary")
        matrix = cls(len(ids), ids.shape[1], fingerprint=about.get("fingerprint", ""))
        matrix.candidates.copy_(ids)
        matrix.probabilities.copy_(p)
        return matrix.to(device)

    def check(self, vocab_size: int, fingerprint: str, *, what: str) -> None:
        """Refuse a model (``what``) that this matrix was not made with.

        Raises:
            TokenRecyclingError: vocabulary or tokenizer differ.
        """
        self._check_same(vocab_size, self.k, fingerprint, what)

    def _check_same(self, vocab_size: int, k: int, fingerprint: str, what: str) -> None:
        if vocab_size != self.vocab_size:
            raise TokenRecyclingError(
                f"the matrix has {self.vocab_size} tokens and {what} has {vocab_size}"
            )
        if k != self.k:
            raise TokenRecyclingError(f"the matrix keeps k={self.k} candidates, {what} k={k}")
        if self.fingerprint and fingerprint and fingerprint != self.fingerprint:
            raise TokenRecyclingError(
                f"the matrix was made with another tokenizer ({self.fingerprint}) "
                f"than that of {what} ({fingerprint})"
            )
