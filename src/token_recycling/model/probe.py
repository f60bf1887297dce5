"""Self-probe: does this model compute a tree like each of the tree's paths on its own?

How a 4D mask, positions and a cache are used is up to the model's code, and some models get it
silently wrong. So every model is tested at load, and again whenever it has changed.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from skinny_kernels.batch_invariance import RoundingWatch
from skinny_kernels.errors import one_line
from skinny_kernels.shadow import shadow_of
from token_recycling.drafting.draft import DraftTree, root_only
from token_recycling.drafting.size.auto import GRAPH_SIZES
from token_recycling.drafting.templates import TreeShape, TreeTemplate
from token_recycling.errors import PlainDecodingWarning, TokenRecyclingError, warn_caller
from token_recycling.model.base import Target
from token_recycling.model.fallback import PlainTarget
from token_recycling.model.limits import text_config
from token_recycling.model.lm_head import Float32Head
from token_recycling.model.target import TreeTarget

FIRST_TOKENS = 1024
PREFIX = 20  # tokens before the probe's tree
WINDOW = 9  # largest window while probing, so that the prefix exceeds every window
TEMPLATE = TreeTemplate.from_paths("probe", [[0], [1], [0, 0], [0, 1], [1, 0]])
LEAVES = ((0, 1, 3), (0, 1, 4), (0, 2, 5))  # node indices of the root-to-leaf paths
COMMITTED = (0, 1, 4)
# Rows and tokens of drafts whose bits are compared on a GPU: those of captured steps.
SHAPES = [
    (rows, size)
    for rows in (1, 2, 4, 8, 16)
    for size in GRAPH_SIZES
    if size > 1 and rows * size <= 256
]
# Largest allowed difference, in standard deviations of the logits.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}


def open_target(model: Any, *, strict: bool = False, float32_logits: bool = False) -> Target:
    """Probe ``model`` and wrap it as a target.

    Args:
        model: the model.
        strict: raise instead of falling back to standard decoding.
        float32_logits: compute the logits in float32.

    Returns:
        A ``TreeTarget``, or a ``PlainTarget`` after a ``PlainDecodingWarning`` with the reason.

    Raises:
        TokenRecyclingError: ``strict`` is set and the model cannot verify trees; it is not a
            Transformers model; it has an encoder; or ``float32_logits`` is set and its LM head
            does not support it.
    """
    if not isinstance(model, GenerationMixin):
        kind = type(model).__name__
        raise TokenRecyclingError(f"{kind} is not a Transformers model; pass the model it wraps")
    if getattr(model.config, "is_encoder_decoder", False):
        raise TokenRecyclingError("models with an encoder are not supported")
    lm_head = Float32Head(model) if float32_logits else None
    try:
        target = TreeTarget(model, lm_head)
        reason = probe(target) if target.refused is None else target.foreign
    except TokenRecyclingError as error:
        reason = str(error)
    except Exception as error:  # whatever unknown code raises
        reason = f"{type(error).__name__}: {one_line(error, 160)}"
    if reason is None:
        return target
    message = f"{type(model).__name__} does not support tree attention: {reason}"
    if strict:
        raise TokenRecyclingError(message)
    warn_caller(f"{message}; falling back to standard decoding", PlainDecodingWarning)
    return PlainTarget(model, lm_head)


def probe_changes(target: TreeTarget) -> str | None:
    """Adopt and probe the model anew if it has changed; to be called before every answer.

    Returns:
        Why ``target`` must not verify trees now, or None.
    """
    change = "it was copied" if target.fingerprint is None else target.fingerprint.change()
    if change is None:
        return target.refused
    try:
        target.adopt()
        reason = target.refused or probe(target)
    except Exception as error:
        reason = str(error) if isinstance(error, TokenRecyclingError) else repr(error)
    target.refused = None if reason is None else one_line(f"since {change}: {reason}", 300)
    return target.refused


def check_unchanged(target: Target, *, whole: bool) -> None:
    """Check that the model is still that of the answer in progress.

    Args:
        target: the model.
        whole: compare all of it. Otherwise only what the answer's next step would read: what
            else has changed cannot change it, and is found before the answer ends.

    Raises:
        TokenRecyclingError: it has changed.
    """
    if not isinstance(target, TreeTarget) or target.refused or target.fingerprint is None:
        return
    if not whole and not target.fingerprint.leaks():
        return
    if (change := target.fingerprint.change()) is not None:
        raise TokenRecyclingError(f"this answer cannot continue: {change}")


def probe(target: TreeTarget) -> str | None:
    """Return why ``target`` must not verify trees, or None if it computes them correctly.

    Verifies a small tree after a prefix longer than every window, then commits one path and
    continues it. The reference is the model's own forward over each whole path, without our cache
    and mask. A negative control, the same tree under a causal mask, must differ from it. Also sets
    ``target.batch_invariant``: on a CPU, whether steps of one token give the same bits as the tree,
    and contain no operation of PyTorch that might round differently in other drafts and batches; on
    a GPU, whether they give the same bits in drafts of all ``SHAPES``.
    """
    rng = torch.Generator().manual_seed(0)
    count = PREFIX + TEMPLATE.size + 1
    # A vocabulary may end in padding tokens, whose identical embeddings would prove nothing.
    most = min(FIRST_TOKENS, target.vocab_size)
    ids = torch.randint(0, most, (count,), generator=rng, device="cpu").tolist()
    prefix, nodes, after = ids[:PREFIX], ids[PREFIX:-1], ids[-1]
    try:
        twin = _twin(target)
        with twin.inference_context():
            worst, control, spread, same_bits = _compare(twin, prefix, nodes, after)
    except Exception as error:
        text = str(error).strip().split("\n")[0][:160]
        return f"the probe failed with {type(error).__name__}: {text}"
    tolerance = TOLERANCE.get(target.rounding, 0.3) * spread
    if not worst <= tolerance:  # also fails for NaN
        return f"its logits in a tree differ by {worst:.2g} from those on the path alone"
    if control <= 2 * worst:
        return "the probe is inconclusive: a wrong mask does not change the logits"
    target.batch_invariant = same_bits
    return None


def _compare(
    target: TreeTarget, prefix: list[int], nodes: list[int], after: int
) -> tuple[float, float, float, bool]:
    """Return the largest errors of tree and control, and the logits' standard deviation.

    Returns:
        In addition, on CPUs and GPUs: whether a path of the tree has the bits of steps of one
        token, and would in any draft (see ``probe``).
    """
    rows = [[*prefix, *(nodes[i] for i in leaf), after] for leaf in LEAVES]
    ids = torch.tensor(rows, device=target.device)
    inputs = {"input_ids": ids}
    if target.takes_positions:  # as generate does; the model's default may differ
        inputs["position_ids"] = torch.arange(ids.shape[1], device=target.device).expand_as(ids)
    compared = ids.shape[1] - len(prefix)  # positions, at the end of every row
    if target.slices_logits:
        inputs["logits_to_keep"] = torch.arange(len(prefix), ids.shape[1], device=target.device)
    with target.lm_head:
        output = target.model(**inputs, use_cache=False, return_dict=True)
    right: Tensor = output.logits[:, -compared:].to(target.device).float()

    # Inputs as generate prepares them: these include, e.g., a soft prompt, which is not in the ids.
    prepared = PlainTarget(target.model, target.lm_head).prefill(rows[:1])
    worst = _distance(prepared[0].float(), right[0, -1])

    shape = TreeShape(TEMPLATE, target.device)
    tokens = torch.tensor([nodes], device=target.device)
    draft = shape.draft(tokens, torch.ones_like(tokens, dtype=torch.bool))
    causal = torch.ones_like(draft.ancestors[0]).tril()[None]
    target.prefill([prefix])

    def difference(node_logits: Tensor) -> float:
        return max(
            _distance(node_logits[list(leaf)], right[row, :-1]) for row, leaf in enumerate(LEAVES)
        )

    wrong = target.verify(replace(draft, ancestors=causal))
    control = difference(wrong[0].float())
    steps, watch = [], RoundingWatch()
    if target.recordings is not None:
        with watch:
            steps = target.steps([nodes[node] for node in COMMITTED])
        target.cache.rewind([len(prefix)])
    tree = target.verify(draft)[0]
    row_by_row = bool(steps) and watch.operation is None
    same_bits = row_by_row and torch.equal(tree[list(COMMITTED)], torch.cat(steps))
    if target.device.type == "cuda":
        same_bits = has_bits_of_plain_steps(target, prefix, [nodes[node] for node in COMMITTED])
        target.prefill([prefix])
    worst = max(worst, difference(tree.float()))

    path = torch.tensor([COMMITTED], device=target.device)
    target.commit(path, [len(COMMITTED)])
    last = TreeShape(TreeTemplate.chain(1), target.device)
    pair = torch.tensor([[after, after]], device=target.device)
    logits = target.verify(last.draft(pair, torch.ones_like(pair, dtype=torch.bool)))[0, 0].float()
    worst = max(worst, _distance(logits, right[LEAVES.index(COMMITTED), -1]))
    return worst, control, float(right[right.isfinite()].std()), same_bits


def has_bits_of_plain_steps(target: TreeTarget, prefix: list[int], path: list[int]) -> bool:
    """Return whether tokens have the bits of plain steps in drafts of all ``SHAPES``.

    Which kernel a GPU's library multiplies with depends on the number of tokens and is not known,
    so that each number is tried that steps will have. The context is dropped.

    Args:
        target: the model.
        prefix: tokens before the root.
        path: a root, its child, and a child of that.
    """
    for rows in sorted({rows for rows, _ in SHAPES}):
        target.prefill([prefix] * rows)
        plain = []
        for token in path:
            plain.append(target.verify(root_only(torch.tensor([token] * rows, device="cpu")))[:, 0])
            target.commit(torch.zeros((rows, 1), dtype=torch.long, device="cpu"), [1] * rows)
        for size in (size for many, size in SHAPES if many == rows):
            target.cache.rewind([len(prefix)] * rows)
            logits = target.verify(_scattered(path, size, rows))
            for at, right in zip((0, size // 2, size - 1) if size > 2 else (0, 1), plain):
                if not logits[:, at].equal(right):
                    return False
    return True


def _scattered(path: list[int], size: int, rows: int) -> DraftTree:
    """Return drafts whose first, middle and last node are a path; the others are beside it."""
    tokens = torch.full((rows, size), path[0], dtype=torch.long, device="cpu")
    parents, depths = torch.zeros_like(tokens), torch.ones_like(tokens)
    depths[:, 0] = 0
    middle = size // 2
    tokens[:, middle] = path[1]
    ancestors = torch.eye(size, dtype=torch.bool, device="cpu").repeat(rows, 1, 1)
    ancestors[:, :, 0] = True
    if size > 2:
        tokens[:, -1], parents[:, -1], depths[:, -1] = path[2], middle, 2
        ancestors[:, -1, middle] = True
    return DraftTree(
        tokens, parents, depths, ancestors, torch.ones_like(tokens, dtype=torch.bool), 2
    )


def _distance(found: Tensor, right: Tensor) -> float:
    """Return the largest difference; there is none where both are the same infinity, or NaN."""
    same = (found == right) | (found.isnan() & right.isnan())
    return float((found - right).abs().masked_fill(same, 0.0).max())


def _twin(target: TreeTarget) -> TreeTarget:
    """Return a target to probe: the same weights, in evaluation mode and with short windows.

    sdpa and eager attention take the window from the mask alone, so with short windows a short
    prefix exercises them. The model itself is not modified, since others may be using it.
    """
    twin, model = copy.copy(target), target.model
    if any("forward" in vars(module) for module in model.modules()):
        return twin  # hooks such as accelerate's refer to the original modules
    config, text = model.config, text_config(model.config)
    short = copy.copy(text)
    for name in ("sliding_window", "attention_chunk_size"):
        if size := getattr(text, name, None):
            setattr(short, name, min(WINDOW, size))
    configs = {id(text): short}
    if config is not text:
        configs[id(config)] = copy.copy(config)
        for name, value in vars(config).items():
            if value is text:
                setattr(configs[id(config)], name, short)
    twin.model = shadow_of(model, configs, training=False)
    twin.lm_head.cover(twin.model)
    if vars(short) == vars(text) and not any(module.training for module in model.modules()):
        return twin  # what it records is used by answers too
    twin.cast_shadow()
    twin.state = copy.copy(target.state)
    twin.state.windows = {
        kind: window._replace(size=min(WINDOW, window.size))
        for kind, window in target.windows.items()
    }
    return twin
