"""Tiny random models of several architectures, and what Transformers makes of them."""

from __future__ import annotations

import torch

VOCABULARY = 96
WINDOW = 16
COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.4,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
GPT = dict(vocab_size=VOCABULARY, initializer_range=0.4, bos_token_id=1, eos_token_id=2)
# name -> (model class, configuration class, options)
SUPPORTED = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", COMMON),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", COMMON | {"head_dim": 8}),
    "mistral, window": ("MistralForCausalLM", "MistralConfig", COMMON | {"sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        COMMON
        | {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        GPT | dict(n_embd=32, n_layer=3, n_head=4, n_positions=512),
    ),
    "gpt-neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        GPT
        | dict(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=512,
        ),
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", COMMON),
    "llama4, chunks": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        COMMON
        | {
            "head_dim": 8,
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
        },
    ),
    "phi3, window": ("Phi3ForCausalLM", "Phi3Config", COMMON | {"sliding_window": WINDOW}),
}  # fmt: skip
# What must be found out and decoded plainly.
REFUSED = {
    "bloom": ("BloomForCausalLM", "BloomConfig", GPT | dict(hidden_size=32, n_layer=2, n_head=4)),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        GPT | dict(d_model=32, n_layers=2, n_heads=4, max_seq_len=512),
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        GPT | dict(hidden_size=32, num_hidden_layers=2, state_size=8),
    ),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        GPT
        | dict(
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=32,
            max_position_embeddings=512,
        ),
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        COMMON
        | dict(
            head_dim=8,
            layer_types=["linear_attention", "full_attention"] * 2,
            linear_num_value_heads=2,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
    ),
}


def make(table, name, **changes):
    """A random model of ``table`` in float32; greedy text does not end early."""
    import transformers

    model_class, config_class, options = table[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**options | changes)
    model = getattr(transformers, model_class)(config).eval()
    for parameter in model.parameters():  # models whose own initialisation is too tame to branch
        if parameter.ndim == 2 and parameter.std() < 0.1:
            torch.nn.init.normal_(parameter, std=0.4)
    model.generation_config.eos_token_id = None
    return model


def random_prompts(lengths, seed=1, vocabulary=VOCABULARY):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (n,), generator=rng).tolist() for n in lengths]


def plain(model, prompt, n, **options):
    """New tokens of ``model.generate`` for one prompt; greedy unless told otherwise."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": n} | options
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()
