"""The draft-size policy in serving engines: which drafted nodes are worth their time in a step.

A step of R requests that verifies x drafted nodes takes a + b x seconds and emits R tokens and, in
expectation, the sum of the nodes' scores. The policy chooses the nodes that maximise tokens per
second, from the engine's own step times. Where this is no more than plain steps bring, or where
what came was less, it pauses: for some steps nothing is drafted, learnt or even looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

MEMORY = 64.0  # steps after which the weight of an old one is 1/e
PROBE = 3  # plain steps that are timed before the first draft of a number of requests
PROBE_AGAIN = 512  # drafted steps between two such probes
TRIAL = 12  # drafted steps before a decision
PAUSE, LONGEST_PAUSE = 64, 1024  # plain steps; every failed trial doubles them
MARGIN = 1.02  # by how much drafting must be expected to be faster
OUTLIER = 4.0  # a step that takes this many times the expected seconds was interrupted


@dataclass
class _Average:
    """A mean in which old values fade."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        fade = 1 - 1 / MEMORY
        self.total, self.weight = fade * self.total + value, fade * self.weight + 1

    @property
    def value(self) -> float:
        return self.total / self.weight


@dataclass
class _Line:
    """Seconds by drafted nodes: least squares in which old steps fade, drawn to a first slope."""

    slope: float
    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        fade = 1 - 1 / MEMORY
        self.n, self.x, self.y = fade * self.n + 1, fade * self.x + x, fade * self.y + y
        self.xx, self.xy = fade * self.xx + x * x, fade * self.xy + x * y

    def fit(self) -> tuple[float, float]:
        """Return (a, b) of a + b x."""
        mean = self.x / self.n
        # The first slope counts like a few steps whose x differ by half of their mean.
        prior = max(mean, 1.0) ** 2
        spread = self.xx - self.n * mean * mean
        together = self.xy - mean * self.y
        slope = max((together + prior * self.slope) / (spread + prior), 0.0)
        return self.y / self.n - slope * mean, slope


@dataclass
class _Load:
    """What is known of steps with about so many requests; times are seconds per step."""

    plain: _Average = field(default_factory=_Average)
    drafted: _Line | None = None
    tokens: _Average = field(default_factory=_Average)  # per request and drafted step
    seconds: _Average = field(default_factory=_Average)  # of drafted steps
    left: int = PROBE  # plain steps before the next draft
    pause: int = PAUSE
    trial: int = 0  # drafted steps since the last pause
    since_probe: int = 0


class EngineDraftSize:
    """Chooses the drafted nodes of each step; every number of requests is a case of its own."""

    def __init__(self, slope: float) -> None:
        """Start with a guess.

        Args:
            slope: cost of a drafted node, relative to a plain step of one request.
        """
        self.slope = slope
        self._loads: dict[int, _Load] = {}

    def _load(self, requests: int) -> _Load:
        """Numbers of requests up to 4 stand alone, larger ones in ranges of a quarter."""
        key = requests
        if requests > 4:
            unit = 1 << (requests.bit_length() - 3)
            key = requests // unit * unit
        return self._loads.setdefault(key, _Load())

    def drafts(self, requests: int) -> bool:
        """Return False if the next step of so many requests should be a plain one."""
        load = self._load(requests)
        if load.left:
            load.left -= 1
            return False
        return True

    def choose(self, scores: Tensor, valid: Tensor) -> Tensor:
        """Return how many nodes of each draft the next step should verify, roots included.

        Args:
            scores: float [B, n], probability of each node to be accepted, best first; column 0 is
                the root.
            valid: bool [B, n].

        Returns:
            int64 [B]; 1 everywhere if no draft pays.
        """
        requests = len(scores)
        load = self._load(requests)
        none = torch.ones(requests, dtype=torch.long, device="cpu")
        if load.drafted is None:  # the first drafted step
            load.drafted = _Line(self.slope * load.plain.value)
        if load.drafted.n:
            base, slope = load.drafted.fit()
        else:
            base, slope = load.plain.value, load.drafted.slope
        base = max(base, load.plain.value)
        worth = scores[:, 1:].masked_fill(~valid[:, 1:], 0.0).flatten().sort(descending=True).values
        if not len(worth):
            return none
        nodes = torch.arange(1, len(worth) + 1, device="cpu")
        rates = (requests + worth.cumsum(0)) / (base + slope * nodes)
        best = int(rates.argmax())
        if float(rates[best]) < MARGIN * requests / load.plain.value:
            self._trial(load, failed=load.trial + 1 >= TRIAL)
            return none
        least = worth[best]
        return none + ((scores[:, 1:] >= least) & valid[:, 1:] & (least > 0)).sum(dim=1)

    def record(self, requests: int, drafted: int, tokens: int, seconds: float) -> None:
        """Add a step.

        Args:
            requests: that took part; all of them decoding.
            drafted: nodes that were verified, roots not included.
            tokens: that were emitted.
            seconds: from the end of drafting for it to the end of drafting for the next.
        """
        load = self._load(requests)
        if not drafted:
            if not load.plain.weight or seconds < OUTLIER * load.plain.value:
                load.plain.add(seconds)
            return
        if load.drafted is None or seconds > OUTLIER * (load.plain.value + load.seconds.total):
            return
        load.drafted.add(drafted, seconds)
        load.tokens.add(tokens / requests)
        load.seconds.add(seconds)
        load.since_probe += 1
        gain = load.tokens.value * load.plain.value / load.seconds.value
        self._trial(load, failed=load.trial + 1 >= TRIAL and gain < 1)
        if load.since_probe >= PROBE_AGAIN:
            load.left, load.since_probe = PROBE, 0

    def _trial(self, load: _Load, *, failed: bool) -> None:
        """Count a step that was drafted for; pause after a failed trial."""
        load.trial += 1
        if failed:
            load.left = load.pause
            load.pause = min(2 * load.pause, LONGEST_PAUSE)
            load.trial, load.tokens, load.seconds = 0, _Average(), _Average()
        elif load.trial >= 4 * TRIAL:
            load.pause = PAUSE
