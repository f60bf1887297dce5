"""Attention windows."""

from __future__ import annotations

from typing import Literal, NamedTuple


class AttentionWindow(NamedTuple):
    """The attention window of a layer type: ``size`` in positions; ``full`` has no limit."""

    rule: Literal["full", "sliding", "chunked"]
    size: int = 0
