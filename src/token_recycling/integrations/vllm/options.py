"""Options of the plug-in for vLLM, and the configuration of vLLM that they become."""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from token_recycling.errors import TokenRecyclingError
from token_recycling.integrations.engines.options import ServingOptions, load_tokenizer

METHOD = "token_recycling"  # of ``speculative_config``
KEY = "token_recycling"  # of our options in vLLM's ``additional_config``
MODES = ("chain", "tree")
CHAIN_FROM = 16  # minimum nodes of the tree whose most likely branch is the chain
DRAFTED = 6  # tokens, where ``num_speculative_tokens`` is not given
FOLDER = "token_recycling.integrations.vllm."
PROPOSER, SCHEDULER = FOLDER + "Proposer", FOLDER + "scheduler.recycling_scheduler"
# vLLM's method that its Model Runner V2 drafts for on the device; our drafter takes its place.
ON_DEVICE = "ngram_gpu"


@dataclass(frozen=True)
class VllmOptions(ServingOptions):
    """Options for users of vLLM.

    Attributes:
        mode: what is verified for each request: a "chain" or a "tree".
    """

    mode: str = "chain"

    def _check(self) -> None:
        super()._check()
        if self.mode not in MODES:
            raise TokenRecyclingError(
                f"mode is {self.mode!r}; it must be one of {', '.join(MODES)}"
            )


def given_options(vllm_config: Any) -> dict[str, Any] | None:
    """Return our options in a configuration of vLLM; None: it does not use our drafter."""
    config = vllm_config.additional_config
    options = config.get(KEY) if isinstance(config, dict) else None
    return options if isinstance(options, dict) else None


def tokenizer_of(model: Any) -> Any:
    """Load the tokenizer of a model by vLLM's configuration of it; None: it has none."""
    return load_tokenizer(
        None if model.skip_tokenizer_init else model.tokenizer,
        revision=model.tokenizer_revision,
        trust_remote_code=model.trust_remote_code,
    )


def configure(arguments: Any, on_cpu: bool, known: set[str]) -> bool:
    """Translate ``{"method": "token_recycling", …}`` in the arguments of an engine.

    What ``speculative_config`` knows stays there; all else are options of ours, which go to
    ``additional_config``, as vLLM passes that to all of its processes.

    Args:
        arguments: vLLM's ``EngineArgs``, changed.
        on_cpu: whether the engine runs on a CPU.
        known: names of vLLM's own fields of ``speculative_config``.

    Returns:
        Whether the method is ours.

    Raises:
        TokenRecyclingError: an option is unknown or invalid.
    """
    given = {name.replace("-", "_"): value for name, value in arguments.speculative_config.items()}
    if given.get("method") != METHOD:
        _check_spelling(given.get("method"))
        return False
    options = {name: value for name, value in given.items() if name not in known}
    _check_names(options, known)
    parsed = VllmOptions.parse(options)
    speculative = {name: value for name, value in given.items() if name in known}
    drafted = speculative.setdefault("num_speculative_tokens", DRAFTED)
    if not isinstance(drafted, int) or isinstance(drafted, bool) or drafted < 1:
        raise TokenRecyclingError(
            f"num_speculative_tokens is {drafted!r}; it must be a whole number, 1 or more"
        )
    if on_cpu:
        speculative |= {"method": "custom_class", "model": PROPOSER}
    else:
        speculative["method"] = ON_DEVICE
        if not speculative.get("enable_adaptive_verification"):
            speculative.setdefault(
                "num_speculative_tokens_per_batch_size",
                lengths_by_requests(parsed, drafted, arguments.max_num_seqs),
            )
        if parsed.automatic and arguments.scheduler_cls is None:
            arguments.scheduler_cls = SCHEDULER
    arguments.speculative_config = speculative
    arguments.additional_config = {**(arguments.additional_config or {}), KEY: options}
    return True


def lengths_by_requests(
    options: VllmOptions, longest: int, requests: int | None
) -> list[tuple[int, int, int]]:
    """Return how many tokens to draft by the number of requests, as ranges from first to last.

    That is ``longest``, half of it or none, as vLLM captures graphs for all lengths that occur. If
    drafts may pause, the last numbers of requests stand for the lengths that do not occur.

    Args:
        options: ours.
        longest: most tokens of a draft.
        requests: most at once; None: vLLM's default, which is not known here.
    """
    choices = sorted({longest, longest // 2, 0}, reverse=True)
    most = requests or 1024
    room = [options.size_for(at, longest + 1) - 1 for at in range(1, most + 1)]
    lengths = [next(length for length in choices if length <= tokens) for tokens in room]
    if options.automatic:
        missing = [length for length in choices if length not in lengths]
        for at, length in enumerate(missing[: most - 1]):
            lengths[most - len(missing[: most - 1]) + at] = length
    ranges: list[tuple[int, int, int]] = []
    for at, length in enumerate(lengths, start=1):
        if ranges and ranges[-1][2] == length:
            ranges[-1] = (ranges[-1][0], at, length)
        else:
            ranges.append((at, at, length))
    return ranges


def _check_spelling(method: Any) -> None:
    """Refuse a method that is ours but for its spelling."""
    letters = "".join(filter(str.isalnum, str(method).lower()))
    if get_close_matches(letters, ["tokenrecycling"], cutoff=0.8):
        raise TokenRecyclingError(f"speculative_config has the method {method!r}; use {METHOD!r}")


def _check_names(options: dict[str, Any], known: set[str]) -> None:
    """Refuse a name that is neither ours nor vLLM's, and suggest one of either."""
    ours = {field.name for field in fields(VllmOptions)}
    for name in options.keys() - ours:
        near = get_close_matches(name, sorted(ours | known), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(sorted(ours))}"
        raise TokenRecyclingError(f"speculative_config has no option {name!r}; {hint}")
