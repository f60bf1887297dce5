"""Matrix files: safetensors, a table of candidates for tokens, for pairs and for triples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from skinny_kernels.errors import one_line
from token_recycling.errors import TokenRecyclingError
from token_recycling.util.files import is_file, write_tensors
from token_recycling.util.tokens import NO_TOKEN

FORMAT = "token-recycling-matrix-1"
KINDS = ("", "pair_", "triple_")  # prefixes of the tensors of each table
LARGEST_WEIGHT = 100.0  # larger ones are cut


@dataclass(frozen=True)
class MatrixFile:
    """The contents of a matrix file.

    Attributes:
        candidates: int32 [V, k], [P, k] and [T, k], those of tokens, pairs and triples.
        probabilities: float16, of the same shapes.
        keys: int64 [P] and [T], of pairs and triples.
        evidence: float32 [2, f]; see ``AdjacencyMatrix``.
        weights: float64 [s, i].
        about: the file's metadata besides the format.
    """

    candidates: list[Tensor]
    probabilities: list[Tensor]
    keys: list[Tensor]
    evidence: Tensor
    weights: Tensor
    about: dict[str, str]

    def write(self, path: str | Path) -> None:
        """Write the file atomically.

        Raises:
            TokenRecyclingError: it cannot be written.
        """
        tensors = {"evidence": self.evidence, "weights": self.weights}
        for kind, ids, p in zip(KINDS, self.candidates, self.probabilities):
            tensors |= {f"{kind}candidates": ids, f"{kind}probabilities": p}
        tensors |= {f"{kind}keys": keys for kind, keys in zip(KINDS[1:], self.keys)}
        filled = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor.numel()}

        write_tensors(path, filled, {**self.about, "format": FORMAT})

    @classmethod
    def read(cls, path: str | Path) -> MatrixFile:
        """Read a file; NaN, infinite and out-of-range numbers of a tampered one are replaced.

        Raises:
            TokenRecyclingError: the file is missing, damaged or not a matrix file.
        """
        if not is_file(path):
            raise TokenRecyclingError(f"no matrix file at {path}")
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except Exception as error:  # a damaged file may raise anything
            raise TokenRecyclingError(
                f"{path} is not a matrix file, or damaged ({one_line(error, 200)}); "
                "name another file"
            ) from error
        tokens = stored.get("candidates", torch.empty(0, device="cpu"))
        width = tokens.shape[-1] if tokens.ndim == 2 else 0

        def tensors(name: str, empty: Tensor, kinds: tuple[str, ...] = KINDS) -> list[Tensor]:
            return [stored.get(f"{kind}{name}", empty) for kind in kinds]

        contents = cls(
            tensors("candidates", torch.empty(0, width, dtype=torch.int32, device="cpu")),
            tensors("probabilities", torch.empty(0, width, dtype=torch.float16, device="cpu")),
            tensors("keys", torch.empty(0, dtype=torch.int64, device="cpu"), KINDS[1:]),
            stored.get("evidence", torch.zeros(2, 0, dtype=torch.float32, device="cpu")),
            stored.get("weights", torch.zeros(0, 0, dtype=torch.float64, device="cpu")),
            {name: text for name, text in about.items() if name != "format"},
        )
        if about.get("format") != FORMAT or not contents._is_whole():
            raise TokenRecyclingError(f"{path} is not a matrix file of format {FORMAT}")
        size = len(contents.candidates[0])
        if any(bool(((ids < NO_TOKEN) | (ids >= size)).any()) for ids in contents.candidates):
            raise TokenRecyclingError(f"{path} contains candidates outside its vocabulary")
        # Copies: the tensors of an open file may be a view of it.
        return replace(
            contents,
            probabilities=[p.nan_to_num(0.0, 0.0, 0.0).clamp(0, 1) for p in contents.probabilities],
            evidence=contents.evidence.nan_to_num(0.0, 0.0, 0.0).clamp(min=0),
            weights=contents.weights.nan_to_num(0.0, 0.0, 0.0).clamp(
                -LARGEST_WEIGHT, LARGEST_WEIGHT
            ),
        )

    def _is_whole(self) -> bool:
        """Return True if dtypes and shapes fit each other."""
        width = self.candidates[0].shape[-1:]
        keys = [None, *self.keys]
        return (
            all(
                (ids.dtype, p.dtype, ids.ndim) == (torch.int32, torch.float16, 2)
                and ids.shape == p.shape
                and ids.shape[1:] == width
                and ids.shape[1] > 0
                and (
                    row_keys is None
                    or (row_keys.dtype, row_keys.shape) == (torch.int64, ids.shape[:1])
                )
                for ids, p, row_keys in zip(self.candidates, self.probabilities, keys)
            )
            and (self.evidence.dtype, self.evidence.ndim) == (torch.float32, 2)
            and len(self.evidence) == 2
            and (self.weights.dtype, self.weights.ndim) == (torch.float64, 2)
        )
