"""Imports of old module names, each with a ``DeprecationWarning``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "token_recycling"
MOVED = {
    "adjacency": "matrix",
    "api": "recycler",
    "cache": "model.kv_cache",
    "check": "bench.check",
    "compare": "bench.compare",
    "costs": "draft_size.costs",
    "draws": "samplers",
    "integrations.request": "hf_generate.request",
    "integrations.criteria": "hf_generate.criteria",
    "integrations.versions": "integrations.engines.versions",
    "masks": "model.masks",
    "plain_target": "model.fallback",
    "probe": "model.probe",
    "sampling": "hf_generate.prepare",
    "serving": "integrations.engines.requests",
    "target": "model.target",
    "tune": "draft_size.tune",
    "widen": "bench.widen",
}


class _Finder(MetaPathFinder, Loader):
    """Resolves old module names that no other finder has found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != PACKAGE or name not in MOVED:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        now = f"{PACKAGE}.{MOVED[spec.name.partition('.')[2]]}"
        warnings.warn(f"{spec.name} is now {now}", DeprecationWarning, stacklevel=2)
        module = ModuleType(spec.name)
        module.__dict__.update(
            (name, value)
            for name, value in vars(import_module(now)).items()
            if not name.startswith("__")
        )
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: ``create_module`` has filled the module."""


def install() -> None:
    """Append the finder of old names to ``sys.meta_path``, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
