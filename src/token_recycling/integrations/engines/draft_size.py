"""The draft-size policy in serving engines: which drafted nodes are worth their time in a step.

A step of R requests that verifies x drafted nodes takes a + b x seconds and emits R tokens and, in
expectation, the sum of the nodes' scores. The policy takes the nodes that maximise tokens per
second, by the engine's own step times. Where that is no more than plain steps bring, or where what
came was less, drafting pauses: for some steps nothing is drafted, learnt or even looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import Any

import numpy as np

from token_recycling.compiled import compiled

MEMORY = 64.0  # steps after which the weight of an old one is 1/e
PROBE = 4  # plain steps in a row that are timed: before the first draft of all
PROBE_AT = (64, 512)  # and after so many drafted steps of a number of requests, once and always
# Drafting pauses if, after so many drafted steps, tokens per second are less than so many times
# those of plain steps.
TRIALS = ((4, 0.7), (12, 1.0))
# Steps in a row for which no node was worth its time, before a pause: during and after the trials
IDLE = (3, 24)
PAUSE, LONGEST_PAUSE = 64, 1024  # plain steps; every failed trial doubles them
PROVEN = 96  # drafted steps after which the next pause is a short one again
MARGIN = 1.02  # by how much drafting must be expected to be faster
# A slope that no step has shown yet is taken as so many times the assumed one: a few steps correct
# one that is too low, but a slope that is too high would never be tried.
HOPE = 0.3
# Steps of more tokens than this are filled up to a multiple of it with the next best nodes: kernels
# are prepared for every number of tokens anew, and graphs are captured for some.
ROUND = 8
NEAR = 1.5  # ratio of two numbers of requests of which one says something about the other
OUTLIER = 2.0  # a step that takes longer than so many times the expected seconds counts as these


@dataclass
class _Mean:
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
    """Seconds by drafted nodes: least squares in which old steps fade, and a first slope."""

    slope: float
    x: _Mean = field(default_factory=_Mean)
    y: _Mean = field(default_factory=_Mean)
    xx: _Mean = field(default_factory=_Mean)
    xy: _Mean = field(default_factory=_Mean)

    def add(self, x: float, y: float) -> None:
        for mean, value in ((self.x, x), (self.y, y), (self.xx, x * x), (self.xy, x * y)):
            mean.add(value)

    def fit(self, plain: float) -> tuple[float, float]:
        """Return (a, b) of a + b x, where a is at least ``plain``, the seconds of a plain step.

        A plain step counts like one drafted step at x = 0. Then what the first steps take longer
        is put down to their nodes: fewer are drafted next, and that shows what is due to them.
        """
        weight = self.x.weight
        if not weight:
            return plain, self.slope
        x, y = self.x.total / (weight + 1), (self.y.total + plain) / (weight + 1)
        spread = self.xx.total / (weight + 1) - x * x
        together = self.xy.total / (weight + 1) - x * y
        slope = min(max(together / spread, 0.0), (y - plain) / x)
        return max(y - slope * x, plain), max(slope, 0.0)


@dataclass
class _Case:
    """What is known of steps with about so many requests; times are seconds per step."""

    plain: _Mean = field(default_factory=_Mean)
    drafted: _Line | None = None
    tokens: _Mean = field(default_factory=_Mean)  # per request, of drafted steps since a pause
    seconds: _Mean = field(default_factory=_Mean)  # of these steps
    plain_left: int = 0
    pause: int = PAUSE
    steps: int = 0  # drafted since the last pause
    since_probe: int = 0  # drafted since the last plain step
    idle: int = 0


class EngineDraftSize:
    """Chooses the drafted nodes of each step; every number of requests is a case of its own."""

    def __init__(self, slope: float) -> None:
        """Start with a guess.

        Args:
            slope: cost of a drafted node, relative to a plain step.
        """
        self.slope = slope
        self._cases: dict[int, _Case] = {}
        self._first_probe = PROBE
        self._seen: set[int] = set()  # tokens of steps before
        _worthwhile(np.ones((1, 1), np.float32), np.ones((1, 1), np.bool_), 1.0, 1.0)  # compiles it

    def _case(self, requests: int) -> _Case:
        # Up to 7 requests every number is a case; larger ones are taken together by quarters.
        unit = 1 << max(requests.bit_length() - 3, 0)
        number = requests // unit * unit
        case = self._cases.get(number)
        if case is None:
            case = self._cases[number] = _Case()
        return case

    def drafts(self, requests: int) -> bool:
        """Return False if the next step of so many requests should be a plain one."""
        case = self._case(requests)
        if self._first_probe:
            self._first_probe -= 1
            return False
        if case.plain_left:
            case.plain_left -= 1
            return False
        return self._plain(requests) is not None

    def _plain(self, requests: int) -> float | None:
        """Return the seconds of a plain step; None: they must be timed first.

        Those of the nearest number of requests, if these have none and it is near: a request more
        costs what a drafted node costs.
        """
        own = self._case(requests).plain
        if own.weight:  # a case holds more than one number; its time is not scaled
            return own.value
        timed = [number for number, case in self._cases.items() if case.plain.weight]
        if not timed:
            return None
        nearest = min(timed, key=lambda number: abs(number - requests))
        if not _are_near(nearest, requests):
            return None
        ratio = (1 + self.slope * requests) / (1 + self.slope * nearest)
        return self._cases[nearest].plain.value * ratio

    def _first_slope(self, requests: int, plain: float) -> float:
        """Return the seconds of a node before any step of so many requests had one.

        That of the nearest number of requests with drafted steps, if it is near, or a guess.
        """
        known = {
            number: case.drafted
            for number, case in self._cases.items()
            if case.drafted and case.drafted.x.weight and _are_near(number, requests)
        }
        if not known:
            return HOPE * self.slope * plain / (1 + self.slope * requests)
        return known[min(known, key=lambda number: abs(number - requests))].fit(0.0)[1]

    def choose(self, scores: Any, valid: Any) -> Any:
        """Return how many nodes of each draft to verify, roots not included, as an array int64 [B].

        They are 0 everywhere if no node is worth its time.

        Args:
            scores: array float32 [B, n], the probability of each node below the root to be
                accepted, best first.
            valid: array bool [B, n].
        """
        base, slope = self._costs(len(scores))
        counts, rate = _worthwhile(np.ascontiguousarray(scores), valid, base, slope)
        return counts if self._pays(len(scores), rate) else np.zeros_like(counts)

    def choose_common(self, scores: Any, valid: Any) -> int:
        """Return one number of nodes for all drafts, for engines whose drafts have one width.

        See ``choose``.
        """
        requests, most = scores.shape
        base, slope = self._costs(requests)
        tokens = requests + np.where(valid, scores, 0.0).sum(axis=0).cumsum()
        rates = tokens / (base + slope * requests * np.arange(1, most + 1))
        best = int(rates.argmax())
        if not self._pays(requests, float(rates[best])):
            return 0
        unit = ROUND // gcd(ROUND, requests)  # nodes and root of a draft, if the step is large
        whole = best + 2
        if whole * requests > ROUND:
            whole = -(-whole // unit) * unit
        return min(whole - 1, int(most))

    def _costs(self, requests: int) -> tuple[float, float]:
        """Return the seconds of a drafted step without its nodes, and those of a node."""
        case, plain = self._case(requests), self._plain(requests) or 1.0
        if case.drafted is None:
            case.drafted = _Line(self._first_slope(requests, plain))
        if case.steps < TRIALS[0][0]:  # they say little
            return plain, case.drafted.slope
        return case.drafted.fit(plain)

    def _pays(self, requests: int, rate: float) -> bool:
        """Return whether a draft of ``rate`` tokens per second is worth verifying; count if not."""
        case, plain = self._case(requests), self._plain(requests) or 1.0
        if rate >= MARGIN * requests / plain:
            case.idle = 0
            return True
        case.idle += 1
        if case.idle >= IDLE[case.steps >= TRIALS[-1][0]]:
            self._pause(case, plain)
        return False

    def record(self, requests: int, drafted: int, tokens: int, seconds: float) -> None:
        """Add a step in which all requests were decoding.

        A plain step neither verifies drafts nor makes any; a step that verifies some also makes
        some. Others are not added.

        Args:
            requests: that took part.
            drafted: nodes that were verified, roots not included.
            tokens: that were emitted.
            seconds: of the step, drafting for it included.
        """
        if requests + drafted not in self._seen:  # kernels may have been prepared for it
            self._seen.add(requests + drafted)
            return
        case = self._case(requests)
        if not drafted:
            mean, usual = case.plain, self._plain(requests) or seconds
            if mean.weight < PROBE:  # an interrupted step among the first would count for long
                fastest = min(seconds, mean.value) if mean.weight else min(seconds, OUTLIER * usual)
                case.plain = _Mean(fastest * (mean.weight + 1), mean.weight + 1)
            else:
                mean.add(min(seconds, OUTLIER * usual))
            case.since_probe = 0
            return
        plain = self._plain(requests)
        if plain is None or case.drafted is None:
            return
        base, slope = case.drafted.fit(plain)
        seconds = min(seconds, OUTLIER * (base + slope * drafted))
        case.drafted.add(drafted, seconds)
        case.tokens.add(tokens / requests)
        case.seconds.add(seconds)
        case.steps += 1
        case.since_probe += 1
        if case.steps == PROVEN:
            case.pause = PAUSE
        gain = case.tokens.value * plain / case.seconds.value
        if any(case.steps >= steps and gain < least for steps, least in TRIALS):
            self._pause(case, plain)
        elif case.since_probe >= PROBE_AT[case.plain.weight > 0]:
            case.plain_left = PROBE

    def _pause(self, case: _Case, plain: float) -> None:
        case.plain_left = case.pause
        case.pause = min(2 * case.pause, LONGEST_PAUSE)
        case.steps, case.idle = 0, 0
        case.tokens, case.seconds = _Mean(), _Mean()
        if case.drafted is not None and case.drafted.x.weight:
            # Times may change: the next trial starts with half of what the nodes have cost.
            case.drafted = _Line(case.drafted.fit(plain)[1] / 2)


def _are_near(one: int, other: int) -> bool:
    return max(one, other) <= NEAR * min(one, other)


@compiled
def _worthwhile(scores: Any, valid: Any, base: float, slope: float) -> tuple[Any, float]:
    """Take the nodes that maximise tokens per second.

    Args:
        scores: float32 [B, n], best first.
        valid: bool [B, n].
        base: seconds of a step without drafted nodes.
        slope: seconds of a node.

    Returns:
        The number of nodes taken from each draft, int64 [B], and tokens per second, 0 without any
        node.
    """
    worth = np.where(valid, scores, 0.0).flatten()
    worth.sort()
    worth = worth[::-1]
    tokens, best, taken, useful = float(len(scores)), 0.0, 0, 0
    for i in range(len(worth)):
        if worth[i] <= 0:
            break
        useful += 1
        tokens += worth[i]
        rate = tokens / (base + slope * useful)
        if rate > best:
            best, taken = rate, useful
    counts = np.zeros(len(scores), np.int64)
    if not taken:
        return counts, best
    size = len(scores) + taken
    if size > ROUND:
        taken = min(-(-size // ROUND) * ROUND - len(scores), useful)
    least = worth[taken - 1]
    for row in range(len(scores)):
        for node in range(scores.shape[1]):
            if valid[row, node] and scores[row, node] >= least:
                counts[row] += 1
    return counts, best
