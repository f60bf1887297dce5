"""How many kernels a step launches outside the model's forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from skinny_kernels.gpu.launch import launch
from skinny_kernels.modes import ordinary_tensors
from token_recycling.drafting.kernels.device import count, learn, propose, top_k
from token_recycling.graph import kernels

# Operations that are no views and start no kernel on a GPU either
NOT_LAUNCHED = ("empty", "empty_like", "new_empty", "detach", "alias", "lift_fresh", "_unsafe_view")
# Modules that launch kernels of ours
LAUNCHING = (kernels, count, learn, propose, top_k)


class Launches(TorchDispatchMode):
    """Records the operations that start a kernel on a GPU, outside a model's forward."""

    def __init__(self, model: Any) -> None:
        """Record what is called around the forward of ``model``."""
        super().__init__()
        self.model = model
        self.names: list[str] = []
        self._inside = False

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        name = function.name().split("::")[1].split(".")[0]
        if not (self._inside or function.is_view or name in NOT_LAUNCHED):
            self.names.append(name)
        return function(*arguments, **(keywords or {}))

    def during(self, step: Callable[[], Any]) -> list[str]:
        """Return the names of the operations of ``step``."""
        forward = self.model.forward

        def unrecorded(*arguments: Any, **keywords: Any) -> Any:
            self._inside = True
            try:
                return forward(*arguments, **keywords)
            finally:
                self._inside = False

        def launched(kernel: Any, *arguments: Any, **options: Any) -> None:
            self.names.append(kernel.__name__)
            with _disable_current_modes():  # what Triton's interpreter does is no launch
                launch(kernel, *arguments, **options)

        self.model.forward = unrecorded
        try:
            with ordinary_tensors(), torch.no_grad(), ExitStack() as patched:
                for module in LAUNCHING:
                    patched.enter_context(patch.object(module, "launch", launched))
                with self:
                    step()
        finally:
            del self.model.forward
        return self.names
