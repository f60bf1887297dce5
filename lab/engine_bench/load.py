"""What an engine is asked and what came; used by the drivers of both engines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ENGINES = ("vllm", "sglang")
MODES = ("plain", "ngram", "ngram_gpu", "chain", "tree")
WARM_UP = 2  # usual number of prompts before the first pass


@dataclass(frozen=True)
class Load:
    """One life of an engine: how it is started, and the requests it serves.

    Attributes:
        model: folder or Hub name.
        mode: one of ``MODES``.
        arguments: of the engine, beside those of the mode.
        warm_up: prompts as token ids, served at once before the first pass.
        prompts: of the passes, as token ids; every pass gets prompts of its own, so that what was
            learnt before does not help it.
        new_tokens: of every request; the end-of-sequence token does not end it.
        temperature: 0: greedy.
        concurrency: numbers of requests served at once, one after the other.
        chain: most drafted tokens of a chain.
        tree: most drafted nodes of a tree.
        options: of the plug-in.
    """

    model: str
    mode: str
    arguments: dict[str, Any]
    warm_up: list[list[int]]
    prompts: list[list[int]]
    new_tokens: int
    temperature: float
    concurrency: list[int]
    chain: int
    tree: int
    options: dict[str, Any] = field(default_factory=dict)

    def of(self, turn: int) -> list[list[int]]:
        """Return the prompts of the pass with ``concurrency[turn]`` requests at once."""
        return self.prompts[turn :: len(self.concurrency)]

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Load:
        """Read what ``save`` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass
class Pass:
    """All prompts served once, a number of requests at a time.

    Attributes:
        concurrency: requests served at once.
        seconds: from the first request to the last token.
        texts: token ids of the answers.
        first: seconds from a request to its first tokens, per request.
        per_token: seconds per token after these, per request with more of them.
        gaps: seconds between the logits of a step and the next forward, where it is known.
        drafts: number of drafts that were verified, where it is known.
        accepted: number of drafted tokens that were accepted, where it is known.
        accepted_at: these by their position in the draft, where it is known.
        costs: (requests, tokens read, number of steps, their median seconds) of the steps that
            read no prompt, where it is known.
    """

    concurrency: int
    seconds: float = 0.0
    texts: list[list[int]] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    drafts: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    costs: list[tuple[int, int, int, float]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return sum(map(len, self.texts))

    @property
    def rate(self) -> float:
        """New tokens per second."""
        return self.tokens / self.seconds


class Arrivals:
    """Times of the tokens of one request, in seconds of one clock."""

    def __init__(self, begun: float) -> None:
        """Start a request."""
        self._begun = begun
        self._first = self._last = begun
        self._early = self._count = 0

    @property
    def begun(self) -> bool:
        """Whether any token has come."""
        return self._count > 0

    def add(self, count: int, now: float) -> None:
        """Note that the request has ``count`` tokens."""
        if not self._count:
            self._first, self._early = now, count
        self._count, self._last = count, now

    def end(self, found: Pass) -> None:
        """Add the request's times to ``found``."""
        found.first.append(self._first - self._begun)
        if self._count > self._early:
            found.per_token.append((self._last - self._first) / (self._count - self._early))
