"""The recorded steps of a model (see ``capture`` for what records one)."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skinny_kernels.capture import Capture, Scratch
from skinny_kernels.compiled import as_bits
from skinny_kernels.launch import this_thread
from skinny_kernels.linear import FEW_TOKENS
from skinny_kernels.replay import Recording, StepInputs

logger = logging.getLogger(__name__)
# Drafts are filled up to a multiple of ``TILE_TOKENS``, since tiles are four tokens wide and more.
# To record steps of another number of tokens takes as long as ten plain steps of a small model:
# hence the first ``RARE`` times, up to ``MOST_FILLED`` times as many are computed if they are
# recorded, or else the next power of two.
TILE_TOKENS, RARE, MOST_FILLED = 4, 4, 4


class Recordings(threading.local):
    """Recordings of one thread, by rows and tokens of a step and by the number of threads.

    None in place of a recording means that it cannot be made.

    Attributes:
        made: the recordings.
        is_warm: False if the last step was recorded or compared, or filled up for being rare.
        right: whether the first one gave the bits of the model's own code; None: not yet compared.
    """

    def __init__(self, shadow: nn.Module, recordable: bool) -> None:
        """Record nothing yet.

        Args:
            shadow: the shadow of a model.
            recordable: whether it consists of modules of a known form.
        """
        self.made: dict[Any, Recording | None] = {}
        self.right: bool | None = None if recordable else False
        self.is_warm = True
        self._scratch = Scratch()
        self._uses: Counter[tuple[int, int]] = Counter()
        embeddings: Any = getattr(shadow, "get_input_embeddings", lambda: None)()
        self._vocab_size: int = getattr(embeddings, "num_embeddings", 0)

    def fill_up(self, rows: int, tokens: int) -> int:
        """Count a step of ``tokens`` a row; return how many to compute, so that it is fast.

        Sets ``is_warm`` to False if steps of as many are not recorded yet, and will be.
        """
        size = tokens if tokens <= TILE_TOKENS else -(-tokens // TILE_TOKENS) * TILE_TOKENS
        threads = torch.get_num_threads()
        self.is_warm = True
        if size > FEW_TOKENS or self._has(rows, size, threads):
            return size
        self._uses[rows, size] += 1
        if self.right is False or self._uses[rows, size] > RARE:
            return size
        power = 1 << (size - 1).bit_length()
        self.is_warm = False
        recorded = (n for n in range(size, MOST_FILLED * size + 1) if self._has(rows, n, threads))
        return next(recorded, min(power, FEW_TOKENS))

    def _has(self, rows: int, tokens: int, threads: int) -> bool:
        """Return whether steps of so many rows and tokens are recorded."""
        return self.made.get(((rows, tokens), threads)) is not None

    def logits(self, step: StepInputs, forward: Callable[[], Tensor]) -> Tensor:
        """Return the logits of a step, [B, q, V].

        Args:
            step: on a CPU, in inference mode.
            forward: computes it with the model's own code.
        """
        if self.right is False or not self._is_recordable(step):
            return forward()
        key = step.tokens.shape, torch.get_num_threads()
        known = self.made.get(key)
        if known is not None:
            logits = known.replay(step)
            if self.right is None:
                self.is_warm = False
                # Other tokens than those recorded, so that what is not set at a replay shows.
                with Capture(self._scratch, step):
                    own = forward()
                self.right = logits.dtype == own.dtype and np.array_equal(
                    as_bits(logits), as_bits(own)
                )
                if not self.right:
                    logger.warning("steps are not replayed: their bits are not the model's own")
                return own.clone()
            return logits
        if key in self.made:
            return forward()
        self.is_warm = False
        with Capture(self._scratch, step) as capture:
            logits = forward()
        self.made[key] = capture.as_recording(logits)
        # Functions that kernels have computed may be rounded otherwise in later steps.
        return forward() if self.made[key] is None else logits.clone()

    def _is_recordable(self, step: StepInputs) -> bool:
        """Return whether the kernels compute this step now."""
        tokens = step.tokens.numpy()
        return bool(
            tokens.shape[1] <= FEW_TOKENS
            and all(layer.is_initialized for layer in step.cache.layers)
            and 0 <= tokens.min() <= tokens.max() < self._vocab_size
            and this_thread.recorder is None
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )
