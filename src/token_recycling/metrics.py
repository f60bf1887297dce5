"""What a decoding step did, and the statistics over many."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PHASES = ("draft", "verify", "accept", "observe", "commit")


@dataclass(frozen=True)
class Step:
    """One forward of the target over B rows; the first step of a run is its prefill.

    Attributes:
        tokens: per row the tokens emitted: those accepted from the draft, and the bonus token. A
            row that ends inside an accepted path ends with a drafted token.
        reasons: per row why it ended here ("eos", "stop", "length"), or None.
        drafted: per row the tokens drafted.
        nodes: tokens verified per row, the root included.
        seconds: of the phases in ``PHASES``; of the prefill as a whole in the first step. Wall
            clock on the host: on a GPU a phase that waits is charged for work queued before it.
    """

    tokens: list[list[int]]
    reasons: list[str | None]
    drafted: list[int]
    nodes: int
    seconds: tuple[float, ...]

    @property
    def is_prefill(self) -> bool:
        """True for the first step of a run."""
        return len(self.seconds) == 1


@dataclass
class Stats:
    """Statistics of one row, or of several added up.

    Attributes:
        prompt_tokens: tokens read; a kept context is not read again.
        new_tokens: tokens emitted, the one that the prefill yields included.
        steps: forwards after the prefill, counted once per row that took part.
        drafted: tokens proposed.
        accepted: tokens emitted beyond one per step.
        accepted_per_depth: how many steps accepted at least 1, 2, … tokens.
        prefill_seconds: until the first token.
        seconds: by phase, in ``PHASES``.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def add(self, step: Step, row: int, prompt_tokens: int = 0) -> None:
        """Count a step for ``row``; nothing if the row had ended.

        Args:
            step: the prefill, or one that verified a draft.
            row: of the batch.
            prompt_tokens: that the prefill read.
        """
        if not (emitted := len(step.tokens[row])):
            return
        if step.is_prefill:
            self.prompt_tokens += prompt_tokens
            self.new_tokens += emitted
            self.prefill_seconds += step.seconds[0]
            return
        self.steps += 1
        self.new_tokens += emitted
        self.drafted += step.drafted[row]
        self.accepted += emitted - 1
        missing = emitted - 1 - len(self.accepted_per_depth)
        self.accepted_per_depth += [0] * missing
        for depth in range(emitted - 1):
            self.accepted_per_depth[depth] += 1
        for phase, seconds in zip(PHASES, step.seconds, strict=True):
            self.seconds[phase] += seconds

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
        """New tokens per second of decoding, the prefill and its token left out."""
        tokens = self.steps + self.accepted
        return tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, the derived ones too, as JSON types."""
        return {
            **asdict(self),
            "mat": self.mat,
            "tokens_per_second": self.tokens_per_second,
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "decode_seconds": self.decode_seconds,
        }
