"""Prometheus metrics, named after those of vLLM."""

from __future__ import annotations

from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from token_recycling.decoding.metrics import Stats, Step

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80, 160)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
MAT = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16)
M = TypeVar("M", Counter, Gauge, Histogram)
MOST_DEPTH = 16  # positions of a draft that are counted one by one


class Metrics:
    """The counters, gauges and histograms of one server; written by the engine's thread."""

    def __init__(self, model: str) -> None:
        """Create all metrics with the label ``model_name``."""
        self.registry = CollectorRegistry()

        def metric(kind: type[M], name: str, about: str, *labels: str, **options: Any) -> M:
            names = ["model_name", *labels]
            full = f"token_recycling:{name}"
            made = kind(full, about, names, registry=self.registry, **options)
            return made if labels else made.labels(model)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return metric(Histogram, name, about, buckets=buckets)

        self.running = metric(Gauge, "num_requests_running", "Requests being read or decoded.")
        self.waiting = metric(Gauge, "num_requests_waiting", "Requests in the queue.")
        self.prefix_bytes = metric(Gauge, "prefix_cache_bytes", "Bytes of kept contexts.")
        self._prompt = metric(Counter, "prompt_tokens", "Tokens of prompts.")
        self._generated = metric(Counter, "generation_tokens", "Generated tokens.")
        self._queries = metric(Counter, "prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = metric(Counter, "prefix_cache_hits", "Prompt tokens not read again.")
        drafts = "spec_decode_num_"
        self._drafts = metric(Counter, f"{drafts}drafts", "Drafts verified.")
        self._drafted = metric(Counter, f"{drafts}draft_tokens", "Tokens drafted.")
        self._accepted = metric(Counter, f"{drafts}accepted_tokens", "Drafted tokens accepted.")
        depth = f"{drafts}accepted_tokens_per_pos"
        position = metric(Counter, depth, "Accepted tokens by depth.", "position")
        self._position = [position.labels(model, str(depth)) for depth in range(MOST_DEPTH)]
        ended = metric(Counter, "request_success", "Finished requests.", "finished_reason")
        self._ended = {
            reason: ended.labels(model, reason) for reason in ("stop", "length", "abort", "error")
        }
        self._first = histogram("time_to_first_token_seconds", "From arrival.", SECONDS)
        self._queued = histogram("request_queue_time_seconds", "Time in the queue.", SECONDS)
        per_token = "request_time_per_output_token_seconds"
        self._between = histogram(per_token, "Mean per request.", SECONDS)
        self._latency = histogram("e2e_request_latency_seconds", "From arrival to end.", SECONDS)
        self._prompts = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._answers = histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        mat = "Tokens per forward after the prompt (MAT)."
        self._mat = histogram("request_mean_accepted_tokens", mat, MAT)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def began(self, prompt_tokens: int, cached: int, queued: float, first: float) -> None:
        """Count a request whose first token has come.

        Args:
            prompt_tokens: tokens of its prompt.
            cached: those of them that were not read again.
            queued: seconds in the queue.
            first: seconds from arrival to the first token.
        """
        self._prompt.inc(prompt_tokens)
        self._queries.inc(prompt_tokens)
        self._hits.inc(cached)
        self._prompts.observe(prompt_tokens)
        self._generated.inc(1)
        self._queued.observe(queued)
        self._first.observe(first)

    def stepped(self, step: Step) -> None:
        """Count a step after the prefill."""
        self._generated.inc(sum(map(len, step.tokens)))
        for tokens, drafted in zip(step.tokens, step.drafted):
            if drafted:
                self._drafts.inc()
                self._drafted.inc(drafted)
                self._accepted.inc(len(tokens) - 1)
                for counter in self._position[: len(tokens) - 1]:
                    counter.inc()

    def ended(self, reason: str, stats: Stats, seconds: float) -> None:
        """Count a request that has ended ("stop", "length", "abort" or "error")."""
        self._ended[reason].inc()
        if reason in ("stop", "length"):
            self._latency.observe(seconds)
            self._answers.observe(stats.new_tokens)
            if stats.steps:
                self._mat.observe(stats.mat)
                self._between.observe(stats.decode_seconds / (stats.new_tokens - 1))
