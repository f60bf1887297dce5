"""Reuse of a single row's KV cache for a later prompt with the same prefix."""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.model.lm_head import version
from token_recycling.model.target import TreeTarget
from token_recycling.util.tokens import common

OFFSET = 4  # largest offset of learned position embeddings (OPT's is 2)
REREAD = 8  # tokens at the end of the prefix that are read again as a check
# Largest difference, relative to a layer's root mean square, that counts as rounding rather than
# a change of weights.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}


class PrefixCache:
    """The tokens of one row whose keys and values are in the target's cache.

    Created when an answer ends. If weights are trained, merged or switched before the next one,
    the cache is stale. Pointers and versions of the weights reveal most such changes. Writes
    through ``.data`` and switched adapters are found by recomputing the embeddings of all tokens,
    and the keys and values of the last few, which depend on the other weights.
    """

    def __init__(self, target: TreeTarget, tokens: list[int]) -> None:
        """Record ``tokens`` and the current state of the model."""
        self.target, self.tokens = target, tokens
        self._adoptions, self._weights = target.adoptions, self._versions()
        self._embedded = self._embeddings(len(tokens))

    def _versions(self) -> list[tuple[int, int]]:
        return [version(weight) for weight in self.target.model.parameters()]

    def _embeddings(self, count: int) -> list[Tensor]:
        """Return the embeddings of the first ``count`` tokens, and of learned positions if any."""
        given = self.target.model.get_input_embeddings()
        ids = torch.tensor([self.tokens[:count]], device=self.target.device)
        with self.target.inference_context():
            embeddings = [given(ids)]
        for module in self.target.model.modules():
            if isinstance(module, torch.nn.Embedding) and module is not given:
                embeddings.append(module.weight.detach()[: count + OFFSET].clone())
        return embeddings

    def common(self, tokens: list[int]) -> int:
        """Return how many leading tokens of ``tokens`` have valid cache entries."""
        same = min(common(self.tokens, tokens), self.target.cache.end)
        return same if same and self._is_valid(same) else 0

    def _is_valid(self, count: int) -> bool:
        if self._adoptions != self.target.adoptions or self._weights != self._versions():
            return False
        tokens, *positions = self._embedded
        before = [tokens[:, :count], *(rows[: count + OFFSET] for rows in positions)]
        now = self._embeddings(count)
        if [x.dtype for x in before] != [x.dtype for x in now]:
            return False
        if not all(map(torch.equal, before, now)):
            return False
        begin = max(0, count - REREAD)
        tolerance = TOLERANCE.get(self.target.rounding, TOLERANCE[torch.bfloat16])
        return self.target.recompute(self.tokens[begin:count], begin) <= tolerance
