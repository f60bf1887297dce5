"""The recorded steps of a model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from token_recycling.model.cpu.capture import Capture, Recording, Scratch, StepInputs
from token_recycling.model.cpu.launch import recording
from token_recycling.model.cpu.linear import MOST_TOKENS
from token_recycling.util.compiled import as_bits

logger = logging.getLogger(__name__)


class Recordings(threading.local):
    """Recordings of one thread, by rows and tokens of a step and by the number of threads.

    None in place of a recording means that it cannot be made.

    Attributes:
        made: the recordings.
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
        self._scratch = Scratch()
        embeddings: Any = getattr(shadow, "get_input_embeddings", lambda: None)()
        self._vocab_size: int = getattr(embeddings, "num_embeddings", 0)

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
        with Capture(self._scratch, step) as capture:
            logits = forward()
        self.made[key] = capture.recording(logits)
        # Functions that kernels have computed may be rounded otherwise in later steps.
        return forward() if self.made[key] is None else logits.clone()

    def _is_recordable(self, step: StepInputs) -> bool:
        """Return whether the kernels compute this step now."""
        tokens = step.tokens.numpy()
        return bool(
            tokens.shape[1] <= MOST_TOKENS
            and all(layer.is_initialized for layer in step.cache.layers)
            and 0 <= tokens.min() <= tokens.max() < self._vocab_size
            and recording.recorder is None
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )
