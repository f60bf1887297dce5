"""The adjacency matrix: for every token, the k tokens that the target last ranked highest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skinny_kernels.modes import without_autocast
from token_recycling import defaults
from token_recycling.drafting.matrix_file import MatrixFile
from token_recycling.drafting.matrix_merge import merge_evidence, merge_rows, merge_scores
from token_recycling.errors import TokenRecyclingError
from token_recycling.util.tokens import NO_TOKEN

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
    vocabulary = tokenizer.get_vocab()
    tokens, ids = list(vocabulary), np.fromiter(vocabulary.values(), np.int64)
    order = ids.argsort().tolist()
    if not np.diff(ids[order]).all():  # an id has two tokens
        order.sort(key=lambda n: (ids[n], tokens[n]))
    digest = hashlib.sha256(json.dumps([tokens[n] for n in order]).encode())
    digest.update(ids[order].tobytes())
    return f"{vocab_size}-{digest.hexdigest()[:16]}"


def last_occurrences(tokens: Tensor) -> Tensor:
    """Return bool [B, c], True at the last occurrence of each of ``tokens`` [B, c] in its row."""
    same = tokens[:, :, None] == tokens[:, None, :]
    return ~same.triu(diagonal=1).any(dim=2)


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

    def __repr__(self) -> str:
        """Name the size, and how much of it is filled."""
        size = f"{self.rows_seen} of {self.vocab_size} tokens seen, k={self.k}"
        return f"<{type(self).__name__}: {size}, {self.nbytes / 2**20:.1f} MiB>"

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
        scores = merge_scores(self.all_candidates, self.all_probabilities)
        self.all_probabilities.copy_(scores)

    def reset(self) -> None:
        """Clear every row, all evidence and the weights (cold start)."""
        self.all_candidates.fill_(NO_TOKEN)
        self.all_probabilities.zero_()
        self.keys.fill_(NO_KEY)
        self.evidence.zero_()
        self.weights.zero_()

    def pin_memory(self) -> None:
        """Move everything learnt to memory from which and to which a GPU copies directly.

        Raises:
            RuntimeError: there is no GPU, or no such memory.
        """
        for name, tensor in self._learnt().items():
            if not tensor.is_pinned():
                setattr(self, name, tensor.pin_memory())

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
        return missing & last_occurrences(tokens) if bool(missing.any()) else missing

    def update(
        self, tokens: Any, candidates: Any, probabilities: Any = None, valid: Any = None
    ) -> None:
        """Replace the rows of ``tokens``; the last entry of a repeated token wins.

        Args:
            tokens: integers [n], a tensor or an array, like all arguments.
            candidates: [n, k] ids, best first.
            probabilities: [n, k]; None: not recorded.
            valid: bool [n]; False entries are not written. None: all are valid.
        """
        given = (tokens, candidates, 0.0 if probabilities is None else probabilities)
        rows, ids, p = (x.cpu().numpy() if isinstance(x, Tensor) else np.asarray(x) for x in given)
        if valid is not None:
            chosen = np.flatnonzero(valid.cpu() if isinstance(valid, Tensor) else valid)
            rows, ids, p = rows[chosen], ids[chosen], p[chosen] if p.ndim else p
        # NumPy writes repeated indices in order, so that the last one wins; PyTorch need not.
        self.candidates.numpy()[rows] = ids
        self.probabilities.numpy()[rows] = p

    def merge(self, other: AdjacencyMatrix) -> AdjacencyMatrix:
        """Return a new matrix with the rows, evidence and weights of both (see ``matrix_merge``).

        Where scores are equal, or two pairs or triples share a slot, this matrix wins.

        Raises:
            TokenRecyclingError: the two differ in vocabulary, tokenizer, k or number of slots.
        """
        self._check_same(other.vocab_size, other.k, other.fingerprint, "the other matrix")
        for kind in ("pairs", "triples"):
            slots, other_slots = getattr(self, kind), getattr(other, kind)
            if slots and other_slots and slots != other_slots:
                raise TokenRecyclingError(
                    f"one matrix has {slots} slots for {kind}, the other {other_slots}; "
                    "only equal numbers can be merged"
                )
        merged, incoming = self.clone(), other.clone()
        merged.reserve(incoming.pairs, incoming.triples)
        incoming.reserve(merged.pairs, merged.triples)
        strange = (merged.keys != NO_KEY) & (incoming.keys != merged.keys)
        incoming.all_candidates[self.vocab_size :].masked_fill_(strange[:, None], NO_TOKEN)
        merged.all_candidates, merged.all_probabilities = merge_rows(
            (merged.all_candidates, merged.all_probabilities),
            (incoming.all_candidates, incoming.all_probabilities),
        )
        merged.keys.copy_(torch.where(merged.keys == NO_KEY, incoming.keys, merged.keys))
        merged.evidence, merged.weights = merge_evidence(
            (merged.evidence, merged.weights), (incoming.evidence, incoming.weights)
        )
        return merged

    def save(self, path: str | Path, about: dict[str, str] | None = None) -> None:
        """Write the matrix atomically as a safetensors file.

        Args:
            path: the file.
            about: more metadata for the file.

        Raises:
            TokenRecyclingError: the file cannot be written.
        """
        tables = [self.vocab_size, self.pairs, self.triples]
        MatrixFile(
            list(torch.split(self.all_candidates, tables)),
            list(torch.split(self.all_probabilities, tables)),
            list(torch.split(self.keys, tables[1:])),
            self.evidence,
            self.weights,
            {**(about or {}), "fingerprint": self.fingerprint},
        ).write(path)

    @classmethod
    def load(cls, path: str | Path) -> AdjacencyMatrix:
        """Read a file written by ``save``.

        Raises:
            TokenRecyclingError: the file is missing, damaged or not a matrix file.
        """
        file = MatrixFile.read(path)
        size, pairs, triples = map(len, file.candidates)
        matrix = cls(
            size,
            file.candidates[0].shape[1],
            pairs=pairs,
            triples=triples,
            fingerprint=file.about.get("fingerprint", ""),
        )
        with without_autocast(matrix.keys.device):  # to bfloat16 it refuses float16
            matrix.all_candidates = torch.cat(file.candidates)
            matrix.all_probabilities = torch.cat(file.probabilities)
            matrix.keys = torch.cat(file.keys)
        matrix.evidence, matrix.weights = file.evidence, file.weights
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
