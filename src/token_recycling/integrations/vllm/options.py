"""Options of the plug-in for vLLM, and the configuration of vLLM that they become."""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from token_recycling.errors import TokenRecyclingError
from token_recycling.integrations.engines.options import ServingOptions, load_tokenizer

METHOD = "token_recycling"  # of ``speculative_config``
KEY = "token_recycling"  # of our options in vLLM's ``additional_config``
MODES = ("auto", "chain", "tree")
CHAIN_FROM = 16  # minimum nodes of the tree whose most likely branch is the chain
# Tokens of a chain and of a tree, where ``num_speculative_tokens`` is not given
DRAFTED, DRAFTED_TREE = 6, 63
FEW = 4  # tokens, beyond which a draft is halved when there are more requests
FOLDER = "token_recycling.integrations.vllm."
PROPOSER, SCHEDULER = FOLDER + "proposer.Proposer", FOLDER + "scheduler.recycling_scheduler"
# vLLM's method that its Model Runner V2 drafts for on the device; our drafter takes its place.
ON_DEVICE = "ngram_gpu"


@dataclass(frozen=True)
class VllmOptions(ServingOptions):
    """Options for users of vLLM.

    Attributes:
        mode: what is verified for each request: a "chain", a "tree", or "auto": a tree on a GPU
            where that is possible, and a chain elsewhere.
    """

    mode: str = "auto"

    def _check(self) -> None:
        super()._check()
        if self.mode not in MODES:
            raise TokenRecyclingError(
                f"mode is {self.mode!r}; it must be one of {', '.join(MODES)}"
            )


def options_of(vllm_config: Any) -> VllmOptions | None:
    """Return our options in a configuration of vLLM; None: it does not use our drafter."""
    config = vllm_config.additional_config
    options = config.get(KEY) if isinstance(config, dict) else None
    return VllmOptions.parse(options) if isinstance(options, dict) else None


def tokenizer_of(model: Any) -> Any:
    """Load the tokenizer of a model by vLLM's configuration of it; None: it has none."""
    return load_tokenizer(
        None if model.skip_tokenizer_init else model.tokenizer,
        revision=model.tokenizer_revision,
        trust_remote_code=model.trust_remote_code,
    )


def expects_trees(arguments: Any, model: Any, parallel: Any, capability: Any) -> bool:
    """Return whether trees can probably be verified, by what is known before a model is loaded.

    Args:
        arguments: vLLM's ``EngineArgs``.
        model: vLLM's configuration of the model.
        parallel: its configuration of several GPUs.
        capability: major and minor number of an NVIDIA GPU; None: of another device.
    """
    backend = arguments.attention_backend or arguments.attention_config.backend
    chosen = None if backend is None else str(getattr(backend, "name", backend)).upper()
    chosen = None if chosen == "AUTO" else chosen
    return not (
        model.use_mla
        or model.uses_mrope
        or model.is_mm_prefix_lm
        or arguments.enable_lora  # vLLM asks for room for so many tokens of every request then
        or parallel.data_parallel_size > 1  # vLLM drafts as much at any load
        or parallel.decode_context_parallel_size > 1
        or arguments.kv_cache_dtype != "auto"
        or (chosen is not None and chosen not in ("FLASH_ATTN", "TRITON_ATTN"))
        # Ampere to Hopper, where FlashAttention is vLLM's first choice
        or (chosen is None and (capability is None or capability[0] not in (8, 9)))
    )


def configure(arguments: Any, on_cpu: bool, trees: bool, known: set[str]) -> bool:
    """Translate ``{"method": "token_recycling", …}`` in the arguments of an engine.

    What ``speculative_config`` knows stays there; all else are options of ours, which go to
    ``additional_config``, as vLLM passes that to all of its processes.

    Args:
        arguments: vLLM's ``EngineArgs``, changed.
        on_cpu: whether the engine runs on a CPU.
        trees: whether trees are drafted if the mode is "auto".
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
    if parsed.mode == "auto" and not trees:
        options["mode"] = "chain"
    in_trees = not on_cpu and options.get("mode", parsed.mode) != "chain"
    default = DRAFTED_TREE if in_trees else DRAFTED
    drafted = speculative.setdefault("num_speculative_tokens", default)
    if not isinstance(drafted, int) or isinstance(drafted, bool) or drafted < 1:
        raise TokenRecyclingError(
            f"num_speculative_tokens is {drafted!r}; it must be a whole number, 1 or more"
        )
    if on_cpu:
        speculative |= {"method": "custom_class", "model": PROPOSER}
    else:
        speculative["method"] = ON_DEVICE
        table = "num_speculative_tokens_per_batch_size"
        if table not in speculative and not speculative.get("enable_adaptive_verification"):
            speculative[table] = lengths_by_requests(parsed, drafted, arguments.max_num_seqs)
            if parsed.automatic and arguments.scheduler_cls is None:
                arguments.scheduler_cls = SCHEDULER
    arguments.speculative_config = speculative
    arguments.additional_config = {**(arguments.additional_config or {}), KEY: options}
    return True


def lengths_by_requests(
    options: VllmOptions, longest: int, requests: int | None
) -> list[tuple[int, int, int]]:
    """Return how many tokens to draft by the number of requests, as ranges from first to last.

    That is ``longest``, half of it, half of that and so on down to ``FEW``, or none, as vLLM
    captures graphs for all lengths that occur. If drafts may pause, the last numbers of requests
    stand for the lengths that do not occur.

    Args:
        options: ours.
        longest: most tokens of a draft.
        requests: most at once; None: vLLM's default, which is not known here.
    """
    choices = [longest]
    while choices[-1] > FEW:
        choices.append(choices[-1] // 2)
    choices.append(0)
    most = requests or 1024
    room = [options.size_for(at, longest + 1) - 1 for at in range(1, most + 1)]
    lengths = [next(length for length in choices if length <= tokens) for tokens in room]
    if options.automatic:
        missing = [length for length in choices if length not in lengths]
        if len(missing) >= most:  # too many: none at all is the one that is needed most
            missing = [*missing[: most - 2], 0][: most - 1]
        lengths[most - len(missing) :] = missing
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
