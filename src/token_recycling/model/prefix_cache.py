"""What a target has read of a single row, for a later prompt with the same beginning."""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.model.lm_head import version
from token_recycling.model.target import TreeTarget

OFFSET = 4  # by which learned positions may be shifted, as OPT's are by 2
REREAD = 8  # tokens at the end of what is kept that are read again
# Of the root mean square of a layer's entries: what rounding may make, and no change of weights
# that matters does.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}


class PrefixCache:
    """The tokens of one row whose keys and values lie in the target's cache.

    Made when an answer ends. Weights may be trained, merged or switched before the next one, and
    the cache would be that of another model. Pointers and versions of the weights show most of
    that. Writes through ``.data`` and adapters that are switched show in what the model computes:
    the embeddings of all tokens, and the keys and values of the last few, which depend on the
    other weights.
    """

    def __init__(self, target: TreeTarget, tokens: list[int]) -> None:
        """Note ``tokens``, and what the model is like now."""
        self.target, self.tokens = target, tokens
        self._weights = self._versions()
        self._embedded = self._embeddings(len(tokens))

    def _versions(self) -> list[tuple[int, int]]:
        return [version(weight) for weight in self.target.model.parameters()]

    def _embeddings(self, count: int) -> list[Tensor]:
        """Those of the first ``count`` tokens, and of as many positions where they are learned."""
        given = self.target.model.get_input_embeddings()
        ids = torch.tensor([self.tokens[:count]], device=self.target.device)
        with self.target.inference_context():
            found = [given(ids)]
        for module in self.target.model.modules():
            if isinstance(module, torch.nn.Embedding) and module is not given:
                found.append(module.weight.detach()[: count + OFFSET].clone())
        return found

    def common(self, tokens: list[int]) -> int:
        """Tokens at the beginning of ``tokens`` that the target has read, as it is now."""
        same = 0
        for ours, theirs in zip(self.tokens, tokens):
            if ours != theirs:
                break
            same += 1
        same = min(same, self.target.cache.end)
        return same if same and self._is_valid(same) else 0

    def _is_valid(self, count: int) -> bool:
        if self.target.changed() or self._weights != self._versions():
            return False
        tokens, *positions = self._embedded
        before = [tokens[:, :count], *(rows[: count + OFFSET] for rows in positions)]
        now = self._embeddings(count)
        if [x.dtype for x in before] != [x.dtype for x in now]:
            return False
        if not all(map(torch.equal, before, now)):
            return False
        begin = max(0, count - REREAD)
        tolerance = TOLERANCE.get(self.target.dtype, TOLERANCE[torch.bfloat16])
        return self.target.reread(self.tokens[begin:count], begin) <= tolerance
