"""How many kernels a step launches outside the model's forward; used by gpu_suite.py and tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from token_recycling.util.modes import ordinary_tensors

# Operations that are no views and start no kernel on a GPU either
NOT_LAUNCHED = ("empty", "new_empty", "detach", "alias", "lift_fresh", "_unsafe_view")
SEVERAL = {"device_top_k": ["device_top_k: maxima", "device_top_k: choose"]}


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
            self.names += SEVERAL.get(name, [name])
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

        self.model.forward = unrecorded
        try:
            with ordinary_tensors(), torch.no_grad(), self:
                step()
        finally:
            del self.model.forward
        return self.names
