"""The adjacency matrix: for every token, the k tokens that the target last ranked highest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from token_recycling import defaults
from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.util.files import is_file, write_atomically
from token_recycling.util.tokens import NO_TOKEN

FORMAT = "token-recycling-matrix-1"
NOTHING = torch.empty(0)
LARGEST_WEIGHT = 100.0  # of a file; larger ones are cut
NO_KEY = torch.iinfo(torch.int64).min  # key of an empty slot
# Names of the learnt tensors
STATE = ("all_candidates", "all_probabilities", "keys", "evidence", "weights")


def fingerprint(tokenizer: Any, vocab_size: int) -> str:
    """Return an identifier of a vocabulary: its size and a hash of its (token, id) pairs.

    A matrix stores token ids, which are meaningful only with the tokenizer that produced them.
    ``tokenizer=None`` gives an empty fingerprint, which matches every tokenizer.
    """
    if tokenizer is None:
        return ""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
    return f"{vocab_size}-{digest[:16]}"


class AdjacencyMatrix:
    """Candidate ids int32 [V, k], best first, with probabilities float16 [V, k].

    The row of a token never seen is all ``NO_TOKEN`` and proposes nothing. A probability of 0
    means that none was recorded (the paper's drafter keeps ids only).

    Optionally there are rows for pairs and for triples of tokens, in hash tables of fixed size in
    which a new pair or triple replaces the old one of its slot; ``evidence`` float32 [2, f], how
    often each kind of candidate was right, and how often it was present; and ``weights`` float64
    [s, i], by which the adaptive drafter mixes its sources.
    """

    def __init__(
        self,
        vocab_size: int,
        k: int = defaults.CANDIDATES,
        *,
        pairs: int = 0,
        triples: int = 0,
        fingerprint: str = "",
    ) -> None:
        """Create an empty matrix with slots for rows of ``pairs`` and ``triples``.

        Raises:
            TokenRecyclingError: ``k`` is not within 1..``vocab_size``.
        """
        if not 1 <= k <= vocab_size:
            raise TokenRecyclingError(f"k is {k}; it must be between 1 and {vocab_size}")
        self.vocab_size, self.k, self.fingerprint = vocab_size, k, fingerprint
        self.pairs, self.triples = pairs, triples
        # Rows of tokens, then those of pairs, then those of triples.
        shape = (vocab_size + pairs + triples, k)
        self.all_candidates = torch.full(shape, NO_TOKEN, dtype=torch.int32, device="cpu")
        self.all_probabilities = torch.zeros(shape, dtype=torch.float16, device="cpu")
        self.keys = torch.full((pairs + triples,), NO_KEY, device="cpu")
        self.evidence = torch.zeros((2, 0), dtype=torch.float32, device="cpu")
        self.weights = torch.zeros((0, 0), dtype=torch.float64, device="cpu")

    @property
    def candidates(self) -> Tensor:
        """int32 [V, k], best first; ``NO_TOKEN`` where nothing was seen."""
        return self.all_candidates[: self.vocab_size]

    @property
    def probabilities(self) -> Tensor:
        """float16 [V, k] within 0..1; 0 where not recorded."""
        return self.all_probabilities[: self.vocab_size]

    @property
    def pairs_seen(self) -> int:
        """Number of pairs that have a row."""
        return int((self.keys[: self.pairs] != NO_KEY).sum())

    @property
    def triples_seen(self) -> int:
        """Number of triples that have a row."""
        return int((self.keys[self.pairs :] != NO_KEY).sum())

    @property
    def nbytes(self) -> int:
        """Bytes of everything learnt: (V + P + T) · k · (4 + 2) + (P + T) · 8, and the counts."""
        return sum(getattr(self, name).nbytes for name in STATE)

    @property
    def rows_seen(self) -> int:
        """Number of tokens that have a row."""
        return int((self.candidates[:, 0] != NO_TOKEN).sum())

    def reserve(self, pairs: int, triples: int) -> None:
        """Add slots for pairs and triples, unless the matrix has some of that kind already."""
        pairs, triples = self.pairs or pairs, self.triples or triples
        if (pairs, triples) == (self.pairs, self.triples):
            return
        grown = AdjacencyMatrix(self.vocab_size, self.k, pairs=pairs, triples=triples)
        split, first = self.vocab_size + self.pairs, self.vocab_size + pairs
        for name in ("all_candidates", "all_probabilities"):
            old, new = getattr(self, name), getattr(grown, name)
            new[:split] = old[:split]
            new[first : first + self.triples] = old[split:]
            setattr(self, name, new)
        grown.keys[: self.pairs] = self.keys[: self.pairs]
        grown.keys[pairs : pairs + self.triples] = self.keys[self.pairs :]
        self.keys, self.pairs, self.triples = grown.keys, pairs, triples

    def assume_probabilities(self) -> None:
        """Give rows recorded without probabilities 1/2, 1/4, … by rank."""
        self.all_probabilities.copy_(self._scores())

    def reset(self) -> None:
        """Clear every row, all evidence and the weights (cold start)."""
        self.all_candidates.fill_(NO_TOKEN)
        self.all_probabilities.zero_()
        self.keys.fill_(NO_KEY)
        self.evidence.zero_()
        self.weights.zero_()

    def _learnt(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in STATE}

    def state(self) -> dict[str, Tensor]:
        """Return copies of all learnt tensors, for ``restore``."""
        return {name: tensor.clone() for name, tensor in self._learnt().items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore a ``state`` of a matrix of the same shape."""
        for name, tensor in self._learnt().items():
            tensor.copy_(state[name])

    def copy_(self, other: AdjacencyMatrix) -> AdjacencyMatrix:
        """Copy everything learnt from ``other``, of the same shape; return self."""
        self.restore(other._learnt())
        return self

    def clone(self) -> AdjacencyMatrix:
        """Return an independent copy."""
        twin = AdjacencyMatrix(
            self.vocab_size,
            self.k,
            pairs=self.pairs,
            triples=self.triples,
            fingerprint=self.fingerprint,
        )
        twin.evidence = torch.zeros_like(self.evidence)
        twin.weights = torch.zeros_like(self.weights)
        return twin.copy_(self)

    def seen(self, tokens: Tensor) -> Tensor:
        """Return which of ``tokens`` (int64, any shape) have a row: bool of the same shape."""
        return self.candidates[:, 0][tokens] != NO_TOKEN

    def unseen(self, tokens: Tensor) -> Tensor:
        """Find tokens that have no row in the matrix.

        Args:
            tokens: int64 [B, c].

        Returns:
            bool [B, c] on the host, True at the last occurrence of each such token within its batch
            row.
        """
        tokens = tokens.cpu()
        missing = ~self.seen(tokens)
        if not bool(missing.any()):
            return missing
        same = tokens[:, :, None] == tokens[:, None, :]
        return missing & ~same.triu(diagonal=1).any(dim=2)

    def update(
        self,
        tokens: Tensor,
        candidates: Tensor,
        probabilities: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> None:
        """Replace the rows of ``tokens``; the last entry of a repeated token wins.

        Args:
            tokens: int64 [n].
            candidates: [n, k] ids, best first.
            probabilities: [n, k]; None: not recorded.
            valid: bool [n]; False entries are not written. None: all are valid.
        """
        if valid is not None:
            tokens, candidates = tokens[valid], candidates[valid]
            probabilities = None if probabilities is None else probabilities[valid]
        # NumPy writes repeated indices in order, so that the last one wins; PyTorch need not.
        rows = tokens.numpy()
        self.candidates.numpy()[rows] = candidates.numpy()
        p = 0.0 if probabilities is None else probabilities.numpy()
        self.probabilities.numpy()[rows] = p

    def _scores(self) -> Tensor:
        """Return merge scores, float32 [all rows, k]: probabilities, else 2^-(rank + 1)."""
        recorded = self.all_probabilities.float()
        ranks = torch.arange(1, self.k + 1, dtype=torch.float32, device="cpu")
        by_rank = 0.5**ranks
        scores = torch.where(recorded.sum(dim=1, keepdim=True) > 0, recorded, by_rank)
        return scores.masked_fill(self.all_candidates == NO_TOKEN, 0.0)

    def merge(self, other: AdjacencyMatrix) -> AdjacencyMatrix:
        """Return a new matrix with the rows and the evidence of both.

        A row that only one matrix has is copied. Where both have one, the scores of equal
        candidates are added, the best k are kept and recorded probabilities are averaged. On equal
        scores, and where two pairs or triples share a slot, this matrix wins. The weights are
        averaged in proportion to the evidence.

        Raises:
            TokenRecyclingError: the two differ in vocabulary, tokenizer, k or number of slots.
        """
        self._check_same(other.vocab_size, other.k, other.fingerprint, "the other matrix")
        for kind in ("pairs", "triples"):
            mine, its = getattr(self, kind), getattr(other, kind)
            if mine and its and mine != its:
                raise TokenRecyclingError(
                    f"one matrix has {mine} slots for {kind}, the other {its}; "
                    "only equal numbers can be merged"
                )
        merged, theirs = self.clone(), other.clone()
        merged.reserve(theirs.pairs, theirs.triples)
        theirs.reserve(merged.pairs, merged.triples)
        strange = (merged.keys != NO_KEY) & (theirs.keys != merged.keys)
        theirs.all_candidates[self.vocab_size :].masked_fill_(strange[:, None], NO_TOKEN)
        ids = torch.cat([merged.all_candidates, theirs.all_candidates], dim=1)
        scores = torch.cat([merged._scores(), theirs._scores()], dim=1)
        p = torch.cat([merged.all_probabilities, theirs.all_probabilities], dim=1).float()
        k = self.k
        match = (ids[:, :k, None] == ids[:, None, k:]) & (ids[:, :k, None] != NO_TOKEN)
        scores[:, :k] += (match * scores[:, None, k:]).sum(dim=2)
        p[:, :k] += (match * p[:, None, k:]).sum(dim=2)
        repeated = match.any(dim=1)
        scores[:, k:].masked_fill_(repeated, -1.0)
        scores.masked_fill_(ids == NO_TOKEN, -1.0)
        order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
        both = (ids[:, :1] != NO_TOKEN) & (ids[:, k : k + 1] != NO_TOKEN)
        taken = scores.gather(1, order) >= 0
        merged.all_candidates.copy_(ids.gather(1, order).masked_fill(~taken, NO_TOKEN))
        merged.all_probabilities.copy_(
            (p.gather(1, order) * torch.where(both, 0.5, 1.0)).masked_fill(~taken, 0.0)
        )
        merged.keys.copy_(torch.where(merged.keys == NO_KEY, theirs.keys, merged.keys))
        merged._merge_evidence(theirs)
        return merged

    def _merge_evidence(self, other: AdjacencyMatrix) -> None:
        """Add the counts of ``other``, and average the weights."""
        trials, more = self._trials, other._trials
        if self.evidence.shape == other.evidence.shape:
            self.evidence += other.evidence
        elif not self.evidence.numel():
            self.evidence = other.evidence
        if not self.weights.numel() or not trials:
            self.weights = other.weights if other.weights.numel() else self.weights
        elif self.weights.shape == other.weights.shape and more:
            self.weights = (trials * self.weights + more * other.weights) / (trials + more)

    @property
    def _trials(self) -> float:
        return float(self.evidence[1].sum())

    def save(self, path: str | Path) -> None:
        """Write the matrix atomically as a safetensors file.

        Raises:
            TokenRecyclingError: the file cannot be written.
        """
        tensors = {
            "candidates": self.candidates.contiguous(),
            "probabilities": self.probabilities.contiguous(),
        }
        first = 0
        for name, count in (("pair", self.pairs), ("triple", self.triples)):
            rows = slice(self.vocab_size + first, self.vocab_size + first + count)
            if count:
                tensors |= {
                    f"{name}_keys": self.keys[first : first + count].contiguous(),
                    f"{name}_candidates": self.all_candidates[rows].contiguous(),
                    f"{name}_probabilities": self.all_probabilities[rows].contiguous(),
                }
            first += count
        for name in ("evidence", "weights"):
            if getattr(self, name).numel():
                tensors[name] = getattr(self, name)
        about = {"format": FORMAT, "fingerprint": self.fingerprint}

        def write(partial: Path) -> None:
            try:
                save_file(tensors, partial, metadata=about)
            except SafetensorError as error:
                raise OSError(str(error)) from error

        write_atomically(path, write)

    @classmethod
    def load(cls, path: str | Path) -> AdjacencyMatrix:
        """Read a file written by ``save``.

        Raises:
            TokenRecyclingError: the file is missing, damaged or not a matrix file.
        """
        if not is_file(path):
            raise TokenRecyclingError(f"no matrix file at {path}")
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except Exception as error:  # a damaged file may raise anything
            raise TokenRecyclingError(
                f"{path} is damaged or not a matrix file ({one_line(error, 200)}); "
                "delete it or save it again"
            ) from error
        tables = [_Table.of(found, prefix) for prefix in ("", "pair_", "triple_")]
        evidence = found.get("evidence", torch.zeros(2, 0, dtype=torch.float32))
        weights = found.get("weights", torch.zeros(0, 0, dtype=torch.float64))
        if (
            about.get("format") != FORMAT
            or not all(table.is_whole(tables[0]) for table in tables)
            or (evidence.dtype, evidence.ndim, evidence.shape[:1]) != (torch.float32, 2, (2,))
            or (weights.dtype, weights.ndim) != (torch.float64, 2)
        ):
            raise TokenRecyclingError(f"{path} is not a matrix file of format {FORMAT}")
        ids = torch.cat([table.candidates for table in tables])
        vocab_size, pairs, triples = (len(table.candidates) for table in tables)
        if bool(((ids < NO_TOKEN) | (ids >= vocab_size)).any()):
            raise TokenRecyclingError(f"{path} contains candidates outside its vocabulary")
        matrix = cls(
            vocab_size,
            ids.shape[1],
            pairs=pairs,
            triples=triples,
            fingerprint=about.get("fingerprint", ""),
        )
        matrix.all_candidates.copy_(ids)
        # Replace NaN, infinite and out-of-range values of a tampered file.
        p = torch.cat([table.probabilities for table in tables])
        matrix.all_probabilities.copy_(p.nan_to_num(0.0, 0.0, 0.0).clamp(0, 1))
        matrix.keys.copy_(torch.cat([table.keys for table in tables[1:]]))
        matrix.evidence = evidence.nan_to_num(0.0, 0.0, 0.0).clamp(min=0)
        matrix.weights = weights.nan_to_num(0.0, 0.0, 0.0).clamp(-LARGEST_WEIGHT, LARGEST_WEIGHT)
        return matrix

    def check(self, vocab_size: int, fingerprint: str, *, what: str) -> None:
        """Check that the matrix fits a model, named ``what`` in messages.

        Raises:
            TokenRecyclingError: the vocabulary or the tokenizer differs.
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
                f"the matrix was made with a different tokenizer ({self.fingerprint}) "
                f"from that of {what} ({fingerprint})"
            )


@dataclass(frozen=True)
class _Table:
    """Rows of one kind, as read from a file."""

    candidates: Tensor
    probabilities: Tensor
    keys: Tensor  # none for tokens

    @classmethod
    def of(cls, found: dict[str, Tensor], prefix: str) -> _Table:
        """Select the tensors with this prefix; none is a table without rows."""
        tokens = found.get("candidates", NOTHING)
        width = tokens.shape[-1] if tokens.ndim == 2 else 0
        return cls(
            found.get(f"{prefix}candidates", torch.empty(0, width, dtype=torch.int32)),
            found.get(f"{prefix}probabilities", torch.empty(0, width, dtype=torch.float16)),
            found.get(f"{prefix}keys", torch.empty(0, dtype=torch.int64)) if prefix else NOTHING,
        )

    def is_whole(self, tokens: _Table) -> bool:
        """Return True if dtypes and shapes fit each other and the rows of ``tokens``."""
        ids, p = self.candidates, self.probabilities
        return (
            (ids.dtype, p.dtype) == (torch.int32, torch.float16)
            and ids.ndim == 2
            and ids.shape == p.shape
            and ids.shape[1:] == tokens.candidates.shape[1:]
            and ids.shape[1] > 0
            and (
                self.keys is NOTHING
                or (self.keys.dtype, self.keys.shape) == (torch.int64, ids.shape[:1])
            )
        )
