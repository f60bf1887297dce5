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
from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.files import is_file, write_atomically
from token_recycling.tokens import NO_TOKEN

FORMAT = "token-recycling-matrix-1"
NO_KEY = torch.iinfo(torch.int64).min  # key of an empty slot
STATE = ("_candidates", "_probabilities", "_keys", "evidence")  # names of the learnt tensors


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

    Optionally there are rows for pairs of tokens, in a hash table of fixed size in which a new
    pair replaces the old one of its slot, and ``evidence`` float32 [2, f]: how often each kind of
    candidate was right, and how often it was present (see ``drafters.calibration``).
    """

    def __init__(
        self,
        vocab_size: int,
        k: int = defaults.CANDIDATES,
        *,
        pairs: int = 0,
        device: torch.device | str = "cpu",
        fingerprint: str = "",
    ) -> None:
        """Create an empty matrix with ``pairs`` slots for rows of pairs.

        Raises:
            TokenRecyclingError: ``k`` is not within 1..``vocab_size``.
        """
        if not 1 <= k <= vocab_size:
            raise TokenRecyclingError(f"k is {k}; it must be between 1 and {vocab_size}")
        self.vocab_size, self.k, self.fingerprint = vocab_size, k, fingerprint
        # Two extra rows avoid special cases: token t has row t + 1, row 0 belongs to NO_TOKEN and
        # stays empty, and row V + 1 takes masked writes. The rows of pairs follow. The last entry
        # of the keys takes masked writes too.
        rows = vocab_size + 2 + pairs
        self._candidates = torch.full((rows, k), NO_TOKEN, dtype=torch.int32, device=device)
        self._probabilities = torch.zeros((rows, k), dtype=torch.float16, device=device)
        self._keys = torch.full((pairs + 1,), NO_KEY, device=device)
        self.evidence = torch.zeros((2, 0), dtype=torch.float32, device=device)
        self._winners = torch.empty(rows, dtype=torch.int32, device=device)  # for ``_last``

    @property
    def candidates(self) -> Tensor:
        """int32 [V, k], best first; ``NO_TOKEN`` where nothing was seen."""
        return self._candidates[1 : self.vocab_size + 1]

    @property
    def probabilities(self) -> Tensor:
        """float16 [V, k] within 0..1; 0 where not recorded."""
        return self._probabilities[1 : self.vocab_size + 1]

    @property
    def pairs(self) -> int:
        """Number of slots for pairs."""
        return len(self._keys) - 1

    @property
    def pairs_seen(self) -> int:
        """Number of pairs that have a row."""
        return int((self._keys[:-1] != NO_KEY).sum())

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self._candidates.device

    @property
    def nbytes(self) -> int:
        """Bytes of rows, keys and evidence: (V + pairs) · k · (4 + 2) + pairs · 8 + f · 8."""
        rows = (self.vocab_size + self.pairs) * self.k * 6
        return rows + self.pairs * 8 + self.evidence.nbytes

    @property
    def rows_seen(self) -> int:
        """Number of tokens that have a row."""
        return int((self.candidates[:, 0] != NO_TOKEN).sum())

    def reserve_pairs(self, pairs: int) -> None:
        """Add ``pairs`` slots for pairs, unless the matrix has some already."""
        if self.pairs or not pairs:
            return
        grown = AdjacencyMatrix(self.vocab_size, self.k, pairs=pairs, device=self.device)
        grown._candidates[: len(self._candidates)] = self._candidates
        grown._probabilities[: len(self._candidates)] = self._probabilities
        self._candidates, self._probabilities = grown._candidates, grown._probabilities
        self._keys, self._winners = grown._keys, grown._winners

    def assume_probabilities(self) -> None:
        """Give rows recorded without probabilities 1/2, 1/4, … by rank."""
        self._probabilities.copy_(self._scores())

    def to(self, device: torch.device | str) -> AdjacencyMatrix:
        """Move all tensors to ``device`` in place; return self."""
        for name in (*STATE, "_winners"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def reset(self) -> None:
        """Clear every row and all evidence (cold start)."""
        self._candidates.fill_(NO_TOKEN)
        self._probabilities.zero_()
        self._keys.fill_(NO_KEY)
        self.evidence.zero_()

    def _learnt(self) -> dict[str, Tensor]:
        return {name.strip("_"): getattr(self, name) for name in STATE}

    def state(self) -> dict[str, Tensor]:
        """Return CPU copies of all learnt tensors, for ``restore``."""
        return {name: tensor.cpu().clone() for name, tensor in self._learnt().items()}

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
            device=self.device,
            fingerprint=self.fingerprint,
        )
        twin.evidence = torch.zeros_like(self.evidence)
        return twin.copy_(self)

    def seen(self, tokens: Tensor) -> Tensor:
        """Return which of ``tokens`` (int64, any shape) have a row: bool of the same shape."""
        return self.candidates[:, 0][tokens] != NO_TOKEN

    def unseen(self, tokens: Tensor) -> Tensor:
        """Find tokens that have no row in the matrix.

        Args:
            tokens: int64 [B, c].

        Returns:
            bool [B, c], True at the last occurrence of each such token within its batch row.
        """
        same = tokens[:, :, None] == tokens[:, None, :]
        return ~(self.seen(tokens) | same.triu(diagonal=1).any(dim=2))

    def offsets(self, ranks: Tensor) -> Tensor:
        """Convert candidate ranks (any shape, each below k) to int32 offsets for ``lookup``."""
        return (ranks + self.k).to(torch.int32)

    def lookup(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        """Return one candidate for each token.

        Args:
            tokens: int32 [B, m], ``NO_TOKEN`` allowed.
            offsets: int32 [m] from ``offsets``, the candidate's rank.

        Returns:
            int32 [B, m], ``NO_TOKEN`` where there is no candidate.
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
        """Replace the rows of ``tokens``; the last entry of a repeated token wins.

        Args:
            tokens: int64 [n].
            candidates: [n, k] ids, best first.
            probabilities: [n, k]; None: not recorded.
            valid: bool [n]; False entries are not written. None: all are valid.
        """
        rows = tokens + 1
        if valid is not None:
            rows = rows.masked_fill(~valid, self.vocab_size + 1)
        last = self._last(rows)
        self._candidates[rows] = candidates[last].to(torch.int32)
        if probabilities is None:
            self._probabilities.index_fill_(0, rows, 0.0)
        else:
            self._probabilities[rows] = probabilities[last].to(torch.float16)

    def rows(self, previous: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Find the row of each pair (previous token, token), or else that of the token alone.

        Args:
            previous: int64 [...]; ``NO_TOKEN`` before the first token of a text.
            tokens: int64 [...].

        Returns:
            Indices for ``fetch``, int64 [...], and bool [...], True where it is the pair's row.
        """
        keys, slots = self._slots(previous, tokens)
        known = self._keys[slots] == keys
        return torch.where(known, slots + (self.vocab_size + 2), tokens + 1), known

    def fetch(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return candidates int32 [..., k] and probabilities float16 [..., k] of ``rows``."""
        return self._candidates[rows], self._probabilities[rows]

    def _slots(self, previous: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return each pair's key and hash-table slot; use a prime number of slots."""
        keys = previous * self.vocab_size + tokens
        return keys, keys.remainder(max(self.pairs, 1))

    def average(
        self,
        previous: Tensor,
        tokens: Tensor,
        candidates: Tensor,
        probabilities: Tensor,
        valid: Tensor,
        *,
        old_weight: float,
    ) -> None:
        """Average new rows into those of the tokens and pairs; keep the k best of the union.

        A probability becomes w · old + (1 - w) · new with w = ``old_weight``. Where there was no
        row, the new one is stored unchanged. Of several entries for one row or slot, only the
        last one takes effect.

        Args:
            previous: int64 [n], the token before each; ``NO_TOKEN`` before the first of a text.
            tokens: int64 [n].
            candidates: int [n, k] ids, best first.
            probabilities: float32 [n, k].
            valid: bool [n]; False entries are not written.
            old_weight: weight of the old row, below 1.
        """
        nowhere = self.vocab_size + 1
        rows = torch.where(valid, tokens + 1, nowhere)
        known = self._candidates[rows, 0] != NO_TOKEN
        candidates = candidates.to(torch.int32)
        if self.pairs:
            keys, slots = self._slots(previous, tokens)
            slots = torch.where(valid, slots, self.pairs)
            same = self._keys[slots] == keys
            of_pairs = torch.where(valid, slots + (self.vocab_size + 2), nowhere)
            rows, known = torch.cat([rows, of_pairs]), torch.cat([known, same])
            candidates = candidates.repeat(2, 1)
            probabilities = probabilities.repeat(2, 1)
        mixed, weights = _averaged(
            self._candidates[rows],
            self._probabilities[rows].float(),
            candidates,
            probabilities,
            old_weight * known[:, None].float(),
        )
        last = self._last(rows)
        if self.pairs:
            self._keys[slots] = keys[last[len(tokens) :] - len(tokens)]
            self._keys[-1] = NO_KEY
        self._candidates[rows] = mixed[last]
        self._probabilities[rows] = weights[last].to(torch.float16)

    def _last(self, rows: Tensor) -> Tensor:
        """Return, for each of ``rows`` (int64 [n]), the index of its last occurrence, int64 [n].

        On CUDA it is undefined which write to a repeated index wins. If all occurrences write the
        values of the last one, the order does not matter.
        """
        order = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        # Only entries written here are read, so the buffer needs no clearing.
        self._winners.scatter_reduce_(0, rows, order, "amax", include_self=False)
        return self._winners[rows].long()

    def _scores(self) -> Tensor:
        """Return merge scores, float32 [all rows, k]: probabilities, else 2^-(rank + 1)."""
        recorded = self._probabilities.float()
        ranks = torch.arange(1, self.k + 1, dtype=torch.float32, device=self.device)
        by_rank = 0.5**ranks
        scores = torch.where(recorded.sum(dim=1, keepdim=True) > 0, recorded, by_rank)
        return scores.masked_fill(self._candidates == NO_TOKEN, 0.0)

    def merge(self, other: AdjacencyMatrix) -> AdjacencyMatrix:
        """Return a new matrix with the rows and the evidence of both.

        A row that only one matrix has is copied. Where both have one, the scores of equal
        candidates are added, the best k are kept and recorded probabilities are averaged. On equal
        scores, and where two pairs share a slot, this matrix wins.

        Raises:
            TokenRecyclingError: the two differ in vocabulary, tokenizer, k or slots for pairs.
        """
        self._check_same(other.vocab_size, other.k, other.fingerprint, "the other matrix")
        if self.pairs and other.pairs and self.pairs != other.pairs:
            raise TokenRecyclingError(
                f"one matrix has {self.pairs} pair slots, the other {other.pairs}; "
                "only equal numbers can be merged"
            )
        merged, theirs = self.clone(), other.clone().to(self.device)
        merged.reserve_pairs(theirs.pairs)
        theirs.reserve_pairs(merged.pairs)
        strange = (merged._keys != NO_KEY) & (theirs._keys != merged._keys)
        theirs._candidates[self.vocab_size + 2 :].masked_fill_(strange[:-1, None], NO_TOKEN)
        ids = torch.cat([merged._candidates, theirs._candidates], dim=1)
        scores = torch.cat([merged._scores(), theirs._scores()], dim=1)
        p = torch.cat([merged._probabilities, theirs._probabilities], dim=1).float()
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
        merged._candidates.copy_(ids.gather(1, order).masked_fill(~taken, NO_TOKEN))
        merged._probabilities.copy_(
            (p.gather(1, order) * torch.where(both, 0.5, 1.0)).masked_fill(~taken, 0.0)
        )
        merged._keys.copy_(torch.where(merged._keys == NO_KEY, theirs._keys, merged._keys))
        if merged.evidence.shape == theirs.evidence.shape:
            merged.evidence += theirs.evidence
        elif not merged.evidence.numel():
            merged.evidence = theirs.evidence
        return merged

    def save(self, path: str | Path) -> None:
        """Write the matrix atomically as a safetensors file.

        Raises:
            TokenRecyclingError: the file cannot be written.
        """
        tensors = {
            "candidates": self.candidates.cpu().contiguous(),
            "probabilities": self.probabilities.cpu().contiguous(),
        }
        if self.pairs:
            ids, p = self.fetch(slice(self.vocab_size + 2, None))
            tensors |= {
                "pair_keys": self._keys[:-1].cpu().contiguous(),
                "pair_candidates": ids.cpu().contiguous(),
                "pair_probabilities": p.cpu().contiguous(),
            }
        if self.evidence.numel():
            tensors["evidence"] = self.evidence.cpu().contiguous()
        about = {"format": FORMAT, "fingerprint": self.fingerprint}

        def write(partial: Path) -> None:
            try:
                save_file(tensors, partial, metadata=about)
            except SafetensorError as error:
                raise OSError(str(error)) from error

        write_atomically(path, write)

    @classmethod
    def load(cls, path: str | Path, *, device: torch.device | str = "cpu") -> AdjacencyMatrix:
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
        nothing = torch.empty(0)
        ids, p = found.get("candidates", nothing), found.get("probabilities", nothing)
        width = ids.shape[-1] if ids.ndim else 0
        keys = found.get("pair_keys", torch.empty(0, dtype=torch.int64))
        pairs = (
            found.get("pair_candidates", torch.empty(0, width, dtype=torch.int32)),
            found.get("pair_probabilities", torch.empty(0, width, dtype=torch.float16)),
        )
        evidence = found.get("evidence", torch.zeros(2, 0, dtype=torch.float32))
        if (
            about.get("format") != FORMAT
            or not _are_rows(ids, p)
            or not _are_rows(*pairs)
            or (keys.dtype, keys.shape) != (torch.int64, pairs[0].shape[:1])
            or ids.shape[1] != pairs[0].shape[1]
            or (evidence.dtype, evidence.ndim, evidence.shape[:1]) != (torch.float32, 2, (2,))
        ):
            raise TokenRecyclingError(f"{path} is not a matrix file of format {FORMAT}")
        every = torch.cat([ids, pairs[0]])
        if bool(((every < NO_TOKEN) | (every >= len(ids))).any()):
            raise TokenRecyclingError(f"{path} contains candidates outside its vocabulary")
        matrix = cls(
            len(ids), ids.shape[1], pairs=len(keys), fingerprint=about.get("fingerprint", "")
        )
        matrix.candidates.copy_(ids)
        # Replace NaN, infinite and out-of-range values of a tampered file.
        matrix.probabilities.copy_(p.nan_to_num(0.0, 0.0, 0.0).clamp(0, 1))
        matrix._keys[:-1] = keys
        matrix._candidates[len(ids) + 2 :] = pairs[0]
        matrix._probabilities[len(ids) + 2 :] = pairs[1].nan_to_num(0.0, 0.0, 0.0).clamp(0, 1)
        matrix.evidence = evidence.nan_to_num(0.0, 0.0, 0.0).clamp(min=0)
        return matrix.to(device)

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


def _averaged(
    old: Tensor, old_p: Tensor, new: Tensor, new_p: Tensor, old_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Average n old and n new rows: the k best candidates, and p = w · old_p + (1 - w) · new_p.

    Args:
        old: int32 [n, k].
        old_p: float32 [n, k].
        new: int32 [n, k], ids unique within a row.
        new_p: float32 [n, k].
        old_weight: w, float32 [n, 1]; 0 takes the new row unchanged.
    """
    same = (old[:, :, None] == new[:, None, :]) & (old_weight > 0)[:, :, None]
    new_p = new_p * (1 - old_weight)
    added = (same * new_p[:, None, :]).sum(dim=2)
    old_p = torch.where(old_weight > 0, old_weight * old_p + added, -1.0)
    new_p = new_p.masked_fill(same.any(dim=1), -1.0)
    p, order = torch.cat([old_p, new_p], dim=1).topk(old.shape[1], dim=1)
    return torch.cat([old, new], dim=1).gather(1, order), p


def _are_rows(ids: Tensor, p: Tensor) -> bool:
    """Return True if dtypes and shapes are those of candidates and their probabilities."""
    types = (ids.dtype, p.dtype) == (torch.int32, torch.float16)
    return types and ids.ndim == 2 and ids.shape == p.shape
