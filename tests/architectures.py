"""Tiny random models of every causal architecture of Transformers that could be made."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch

VOCABULARY = 96
WINDOW = 16
POSITIONS = 512
# Options of all architectures under all their names; each takes those that its configuration has.
COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.4,
    init_std=0.4,
)
for names, value in {
    "hidden_size d_model n_embd emb_dim dim_model": 32,
    "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers": 3,
    "encoder_layers num_encoder_layers": 1,
    "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads": 4,
    "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim dim_head v_head_dim qk_nope_head_dim qk_rope_head_dim rotary_dim": 8,
    "kv_lora_rank q_lora_rank": 16,
    "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff dim_ff n_inner": 48,
    "ffn_hidden_size expert_ffn_hidden_size feed_forward_size": 48,
    "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size": 16,
    "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
    "num_experts_per_tok moe_k moe_topk": 2,
    "n_shared_experts num_shared_experts moe_num_shared_experts": 1,
    "n_group topk_group first_k_dense_replace": 1,
    "max_position_embeddings n_positions n_ctx max_seq_len": POSITIONS,
    "is_decoder": True,
    "add_cross_attention tie_word_embeddings": False,
}.items():
    COMMON |= dict.fromkeys(names.split(), value)
MIXED = dict(
    num_hidden_layers=4,
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
ON_MIXED = f"{WINDOW} on layers 0, 2"
ON_ALL = f"{WINDOW} on every layer"
WINDOWED = dict(sliding_window=WINDOW)


@dataclass(frozen=True)
class Architecture:
    """How to make a tiny random model, and what is known of it.

    Attributes:
        model_class: name of the class in ``transformers``.
        config_class: name of its configuration's class.
        options: what differs from ``COMMON``; None leaves the configuration's own default.
        supported: whether trees can be verified.
        window: how far its layers see.
        why: for a refused one, a pattern that the reason matches.
    """

    model_class: str
    config_class: str
    options: dict[str, Any] = field(default_factory=dict)
    supported: bool = True
    window: str = "none"
    why: str = ""


def _all(names: str, **options: Any) -> dict[str, Architecture]:
    return {}


ARCHITECTURES: dict[str, Architecture] = {}


def make(name: str, **changes: Any) -> Any:
    """A random model in float32, in evaluation mode; greedy text does not end early."""
    import transformers

    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    config_class = getattr(transformers, architecture.config_class)
    known = {f.name for f in fields(config_class)} - architecture.options.keys()
    common = {key: value for key, value in COMMON.items() if key in known}
    given = {k: v for k, v in (architecture.options | changes).items() if v is not None}
    config = config_class(**common | given)
    model = getattr(transformers, architecture.model_class)(config).float().eval()
    for parameter in model.parameters():  # models whose own initialisation is too tame to branch
        if parameter.ndim == 2 and parameter.std() < 0.1:
            torch.nn.init.normal_(parameter, std=0.4)
    model.generation_config.eos_token_id = None
    return model
