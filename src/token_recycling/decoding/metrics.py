"""The record of one decoding step, and statistics over many."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PHASES = ("draft", "verify", "accept", "observe", "commit")


@dataclass(frozen=True)
class Step:
    """One forward of the target over B rows; the first step of a run is its prefill.

    Attributes:
        tokens: per row, the emitted tokens: those accepted from the draft, then the bonus token.
            If the row ends inside the accepted path, the last one is a drafted token.
        reasons: per row, why it ended in this step ("eos", "stop", "length"), or None.
        drafted: per row, the number of drafted tokens.
        size: tokens verified per row, the root included.
        seconds: one value per phase in ``PHASES``; for the prefill, a single total. Wall clock on
            the host: on a GPU, a phase that waits includes the time of work queued before it.
        lost_seconds: during which the thread that decodes did not run, of a target on a CPU.
    """

    tokens: list[list[int]]
    reasons: list[str | None]
    drafted: list[int]
    size: int
    seconds: tuple[float, ...]
    lost_seconds: float = 0.0

    @property
    def is_prefill(self) -> bool:
        """True for the first step of a run."""
        return len(self.seconds) == 1

    @property
    def mean_emitted(self) -> float:
        """Mean number of emitted tokens of the rows that had not ended; 0 if all had."""
        return sum(map(len, self.tokens)) / max(sum(map(bool, self.tokens)), 1)


@dataclass
class Stats:
    """Statistics of one row, or the sum over several.

    Attributes:
        prompt_tokens: prompt tokens read; those of a reused context do not count.
        new_tokens: tokens emitted, including the one of the prefill.
        steps: forwards after the prefill, counted once per row that took part.
        plain_steps: forwards that verified no draft.
        drafted: tokens drafted.
        accepted: tokens emitted after the prefill beyond one per step.
        accepted_per_depth: how many steps accepted at least 1, 2, … tokens.
        prefill_seconds: time to the first token.
        seconds: time after the prefill per phase in ``PHASES``.
        lost_seconds: of these, time during which the thread that decodes did not run, on a CPU:
            other programs, or the limit of a container, had its core.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    plain_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    lost_seconds: float = 0.0

    def add(self, step: Step, row: int, prompt_tokens: int = 0) -> None:
        """Add a step of ``row``; do nothing if the row had ended.

        Args:
            step: the prefill, or a step that verified a draft.
            row: index in the batch.
            prompt_tokens: tokens that the prefill read.
        """
        if not (emitted := len(step.tokens[row])):
            return
        if step.is_prefill:
            self.prompt_tokens += prompt_tokens
            self.new_tokens += emitted
            self.prefill_seconds += step.seconds[0]
            return
        self.steps += 1
        self.plain_steps += not step.drafted[row]
        self.new_tokens += emitted
        self.drafted += step.drafted[row]
        self.accepted += emitted - 1
        missing = emitted - 1 - len(self.accepted_per_depth)
        self.accepted_per_depth += [0] * missing
        for depth in range(emitted - 1):
            self.accepted_per_depth[depth] += 1
        for phase, seconds in zip(PHASES, step.seconds, strict=True):
            self.seconds[phase] += seconds
        self.lost_seconds += step.lost_seconds

    @property
    def mat(self) -> float:
        """Mean accepted tokens: tokens per forward after the prefill, the bonus token included."""
        return 1.0 + self.accepted / self.steps if self.steps else 1.0

    @property
    def decode_seconds(self) -> float:
        """Seconds after the prefill."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding, without the prefill and its token."""
        tokens = self.steps + self.accepted
        return tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens per second of prefill."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, including derived ones, as JSON-compatible values."""
        return {
            **asdict(self),
            "mat": self.mat,
            "tokens_per_second": self.tokens_per_second,
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "decode_seconds": self.decode_seconds,
        }
