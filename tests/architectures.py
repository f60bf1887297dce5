"""Tiny random models of all causal architectures of Transformers that can be built."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from inspect import signature
from typing import Any

import torch

VOCABULARY = 96
WINDOW = 16
POSITIONS = 512
# Options under all their names; each configuration class takes those that it has.
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
    "encoder_layers num_encoder_layers": 3,
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


@dataclass(frozen=True)
class Architecture:
    """How to build a tiny random model, and what to expect of it.

    Attributes:
        model_class: class name in ``transformers``.
        config_class: name of its configuration class.
        options: overrides of ``COMMON``; None keeps the configuration's own default.
        supported: whether the probe accepts it for tree verification.
        window: attention window, for the table.
        why: if refused, a regular expression that the reason matches.
    """

    model_class: str
    config_class: str
    options: dict[str, Any] = field(default_factory=dict)
    supported: bool = True
    window: str = "none"
    why: str = ""


LAYERS = dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
MIXED = LAYERS | dict(sliding_window=WINDOW)
LINEAR = dict(
    num_hidden_layers=4,
    layer_types=["linear_attention", "full_attention"] * 2,
)
DELTA = LINEAR | dict(
    linear_num_value_heads=2,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
CONV = LINEAR | dict(layer_types=["conv", "full_attention"] * 2)
CHUNKED = dict(
    num_hidden_layers=4,
    layer_types=["chunked_attention", "full_attention"] * 2,
    attention_chunk_size=WINDOW,
    intermediate_size_mlp=48,
    initializer_range=0.8,
)
BUSY = dict(num_hidden_layers=4, initializer_range=0.8)  # otherwise they repeat one token
MLA = dict(num_key_value_heads=4)
INDEXED = dict(index_topk=WINDOW, index_head_dim=16, index_n_heads=2)
GEMMA4 = MIXED | dict(global_head_dim=8)
PER_LAYER = dict(vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=8)
SSM = dict(mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_d_ssm=64)
ON_ALL = f"{WINDOW} on every layer"
ON_MIXED = f"{WINDOW} on layers 0, 2"
STATE = "keep a state"
SLOTS = "depends on the cache slot"
DIFFER = "logits in a tree differ"


def _row(
    stem: str, *, model: str = "", config: str = "", window: str = "none", **options: Any
) -> Architecture:
    """Return a supported architecture, by the common prefix of its class names."""
    names = model or f"{stem}ForCausalLM", config or f"{stem}Config"
    return Architecture(*names, options, window=window)


def _rows(names: str, **options: Any) -> dict[str, Architecture]:
    """Return supported architectures from pairs "name:Stem"; "_+" in a name becomes ", "."""
    pairs = (pair.split(":") for pair in names.split())
    return {name.replace("_+", ", "): _row(stem, **options) for name, stem in pairs}


def _refused(rows: dict[str, Architecture], why: str) -> dict[str, Architecture]:
    return {name: replace(row, supported=False, why=why) for name, row in rows.items()}


ARCHITECTURES: dict[str, Architecture] = {
    # one mask, no window
    **_rows(
        "apertus:Apertus arcee:Arcee bitnet:BitNet cohere:Cohere diffllama:DiffLlama doge:Doge "
        "ernie4_5:Ernie4_5 falcon:Falcon gemma:Gemma glm:Glm glm4:Glm4 gpt_neox:GPTNeoX "
        "gpt_neox_japanese:GPTNeoXJapanese granite:Granite helium:Helium hyperclovax:HyperCLOVAX "
        "hunyuan_v1_dense:HunYuanDenseV1 jais2:Jais2 llama:Llama nanochat:NanoChat "
        "nemotron:Nemotron olmo:Olmo olmo2:Olmo2 persimmon:Persimmon phi:Phi qwen2:Qwen2 "
        "qwen3:Qwen3 seed_oss:SeedOss smollm3:SmolLM3 stablelm:StableLm"
    ),
    "falcon, new": _row("Falcon", new_decoder_architecture=True, num_kv_heads=2),
    "emu3": _row("Emu3", config="Emu3TextConfig"),
    "mllama": _row("Mllama", config="MllamaTextConfig", cross_attention_layers=[]),
    # reuses its layers; with an initializer range of 0.4, rounding alone changes logits by 0.16
    "hrm_text": _row("HrmText", initializer_range=0.1, num_hidden_layers=1),
    # mixtures of experts
    **_rows(
        "dots1:Dots1 ernie4_5_moe:Ernie4_5_Moe flex_olmo:FlexOlmo glm4_moe:Glm4Moe "
        "granitemoe:GraniteMoe granitemoeshared:GraniteMoeShared hunyuan_v1_moe:HunYuanMoEV1 "
        "hy_v3:HYV3 jetmoe:JetMoe minimax_m2:MiniMaxM2 mixtral:Mixtral olmoe:Olmoe "
        "phimoe:Phimoe qwen2_moe:Qwen2Moe qwen3_moe:Qwen3Moe solar_open:SolarOpen"
    ),
    "aria_text": _row("AriaText"),
    "dbrx": _row(
        "Dbrx",
        attn_config=dict(kv_n_heads=2, rope_theta=10000.0, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=16, moe_num_experts=4, moe_top_k=2),
    ),
    # multi-head latent attention
    **_rows(
        "axk1:AXK1 deepseek_v2:DeepseekV2 deepseek_v3:DeepseekV3 glm4_moe_lite:Glm4MoeLite "
        "minicpm3:MiniCPM3 youtu:Youtu",
        **MLA,
    ),
    "longcat_flash": _row("LongcatFlash", zero_expert_num=2, **MLA),
    # learned positions and other position encodings
    "gpt2": _row("GPT2", model="GPT2LMHeadModel"),
    "gpt_bigcode": _row("GPTBigCode", initializer_range=0.8),
    "ctrl": _row("CTRL", model="CTRLLMHeadModel"),
    **_rows("biogpt:BioGpt codegen:CodeGen gptj:GPTJ opt:OPT xglm:XGLM"),
    # encoders as decoders
    "bert": _row("Bert", model="BertLMHeadModel", **BUSY),
    "bert-generation": _row("BertGeneration", model="BertGenerationDecoder"),
    **_rows("big_bird:BigBird rembert:RemBert", initializer_range=0.1),
    **_rows("ernie:Ernie megatron-bert:MegatronBert", **BUSY),
    **_rows(
        "camembert:Camembert data2vec-text:Data2VecText roberta:Roberta "
        "roberta-prelayernorm:RobertaPreLayerNorm xlm-roberta:XLMRoberta "
        "xlm-roberta-xl:XLMRobertaXL",
        **BUSY,
    ),
    "xmod": _row("Xmod", default_language="en_XX", **BUSY),
    "electra": _row("Electra", initializer_range=0.8),
    "roc_bert": _row("RoCBert", pronunciation_vocab_size=10, shape_vocab_size=10, **BUSY),
    # a window on every layer
    **_rows(
        "doge_+window:Doge ministral3:Ministral3 mistral:Mistral mixtral_+window:Mixtral "
        "phi3:Phi3 phimoe_+window:Phimoe starcoder2:Starcoder2",
        window=ON_ALL,
        sliding_window=WINDOW,
    ),
    "qwen3_moe, window": _row(
        "Qwen3Moe", window=ON_ALL, sliding_window=WINDOW, use_sliding_window=True
    ),
    # windows on some layers
    **_rows(
        "afmoe:Afmoe beam:Beam cohere2:Cohere2 cohere2_moe:Cohere2Moe cwm:Cwm dots1_+window:Dots1 "
        "exaone4:Exaone4 exaone_moe:ExaoneMoe flint:Flint gemma2:Gemma2 gpt_oss:GptOss "
        "granite_swa:GraniteSWA granitemoe_swa:GraniteMoeSWA kolibri1:Kolibri1 laguna:Laguna "
        "mellum:Mellum mimo_v2_flash:MiMoV2Flash ministral:Ministral olmo3:Olmo3 "
        "vaultgemma:VaultGemma",
        window=ON_MIXED,
        **MIXED,
    ),
    **_rows(
        "qwen2_+window:Qwen2 qwen2_moe_+window:Qwen2Moe qwen3_+window:Qwen3 "
        "smollm3_+window:SmolLM3",
        window=ON_MIXED,
        use_sliding_window=True,
        **MIXED,
    ),
    "modernbert-decoder": _row(
        "ModernBertDecoder", window=ON_MIXED, local_attention=2 * WINDOW, **LAYERS
    ),
    "gemma3": _row("Gemma3", config="Gemma3TextConfig", window=ON_MIXED, **MIXED),
    "gemma3n": _row(
        "Gemma3n",
        config="Gemma3nTextConfig",
        window=ON_MIXED,
        num_kv_shared_layers=2,
        laurel_rank=8,
        **PER_LAYER,
        **MIXED,
    ),
    "gemma4": _row("Gemma4", config="Gemma4TextConfig", window=ON_MIXED, **PER_LAYER, **GEMMA4),
    "gemma4, shared": _row(
        "Gemma4",
        config="Gemma4TextConfig",
        window=ON_MIXED,
        num_kv_shared_layers=2,
        **PER_LAYER,
        **GEMMA4,
    ),
    "gemma4_unified": _row(
        "Gemma4Unified", config="Gemma4UnifiedTextConfig", window=ON_MIXED, **GEMMA4
    ),
    "llama4": _row(
        "Llama4", config="Llama4TextConfig", window=f"chunks of {WINDOW} on layers 0, 2", **CHUNKED
    ),
    # refused: their own positions or masks
    **_refused(
        _rows("bloom:Bloom") | {"falcon, alibi": _row("Falcon", alibi=True)}, "the probe failed"
    ),
    **_refused(
        _rows(
            "bart:Bart bigbird_pegasus:BigBirdPegasus blenderbot:Blenderbot "
            "blenderbot-small:BlenderbotSmall cpmant:CpmAnt "
            "marian:Marian mbart:MBart moshi:Moshi mpt:Mpt mvp:Mvp "
            "pegasus:Pegasus plbart:PLBart "
            "roformer:RoFormer trocr:TrOCR "
            "whisper:Whisper"
        ),
        DIFFER,
    ),
    **_refused(_rows("prophetnet:ProphetNet"), "the probe failed"),
    **_refused(
        {
            "gpt_neo": _row(
                "GPTNeo",
                num_layers=2,
                attention_types=[[["global", "local"], 1]],
                window_size=32,
            )
        },
        "local layers",
    ),
    # refused: no key-value cache
    **_refused(
        {
            "openai-gpt": _row("OpenAIGPT", model="OpenAIGPTLMHeadModel"),
            "reformer": _row(
                "Reformer",
                model="ReformerModelWithLMHead",
                axial_pos_embds=False,
                attn_layers=["local", "lsh"],
                num_buckets=2,
                hash_seed=0,
            ),
            "xlm": _row("XLM", model="XLMWithLMHeadModel"),
            "xlnet": _row("XLNet", model="XLNetLMHeadModel"),
        },
        "",
    ),
    # refused: sparse attention that selects keys by cache slot, or keeps an index
    **_refused(
        _rows(
            "axk2:AXK2 deepseek_v32:DeepseekV32 glm_moe_dsa:GlmMoeDsa hy_v4:HYV4", **MLA, **INDEXED
        ),
        STATE,
    ),
    **_refused(
        {
            "dots3_note": _row(
                "Dots3Note",
                config="Dots3NoteTextConfig",
                layer_types=["indexed_attention"] * 3,
                **MLA,
                **INDEXED,
            ),
            "deepseek_v4": _row(
                "DeepseekV4", sliding_window=WINDOW, o_groups=2, o_lora_rank=8, **INDEXED
            ),
            "minimax_m3": _row(
                "MiniMaxM3VL",
                config="MiniMaxM3VLTextConfig",
                layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
                index_n_heads=2,
                index_head_dim=16,
                index_block_size=4,
                index_topk_blocks=2,
                dense_intermediate_size=48,
            ),
        },
        STATE,
    ),
    # refused: a recurrent or convolutional state
    **_refused(
        {
            **_rows("olmo_hybrid:OlmoHybrid qwen3_next:Qwen3Next", **DELTA),
            "qwen3_5": _row("Qwen3_5", config="Qwen3_5TextConfig", **DELTA),
            "qwen3_5_moe": _row("Qwen3_5Moe", config="Qwen3_5MoeTextConfig", **DELTA),
            "kimi_linear": _row(
                "KimiLinear", linear_head_dim=8, linear_num_heads=4, **LINEAR, **MLA
            ),
            "minimax": _row("MiniMax", block_size=8, **LINEAR),
            "bailing_hybrid": _row("BailingHybrid", num_hidden_layers=4, layer_group_size=2, **MLA),
            **_rows("lfm2:Lfm2 lfm2_moe:Lfm2Moe lfm3:Lfm3", **CONV),
            **_rows("falcon_mamba:FalconMamba mamba:Mamba", state_size=8),
            "mamba2": _row("Mamba2", state_size=8, head_dim=16, n_groups=1),
            "jamba": _row(
                "Jamba",
                num_hidden_layers=4,
                attn_layer_period=2,
                attn_layer_offset=1,
                mamba_d_state=8,
            ),
            "bamba": _row("Bamba", attn_layer_indices=[1], **SSM),
            "falcon_h1": _row("FalconH1", **SSM),
            "granitemoehybrid": _row("GraniteMoeHybrid", **LINEAR, **SSM),
            "nemotron_h": _row(
                "NemotronH",
                num_hidden_layers=None,
                layers_block_type=["linear_attention", "full_attention"],
            ),
            **_rows("recurrent_gemma:RecurrentGemma zamba:Zamba"),
            "zamba2": _row(
                "Zamba2",
                num_hidden_layers=3,
                layers_block_type=["linear_attention", "hybrid", "linear_attention"],
            ),
            "zaya": _row("Zaya", num_experts_per_tok=1),
            "inkling": _row("Inkling", config="InklingTextConfig"),
        },
        STATE,
    ),
    **_refused(
        {
            "rwkv": _row("Rwkv"),
            # 64: the cache rounds the heads' total size up to a multiple of 64, the layers do not
            "xlstm": _row("xLSTM", hidden_size=64, qk_dim_factor=1.0),
        },
        DIFFER,
    ),
    # refused: behaviour that changes at a length beyond that of the probe
    **_refused(
        {
            # keeps the best 40 keys; equal tokens tie, and either may be kept
            "doge, sparse": _row("Doge", keep_window_size=40),
            # layers without rotary positions scale their queries by cache slot
            "llama4, scaled": _row(
                "Llama4",
                config="Llama4TextConfig",
                floor_scale=28,
                attn_scale=8.0,
                no_rope_layers=[1, 0, 1, 0],
                **CHUNKED,
            ),
        },
        SLOTS,
    ),
}


def make(name: str, **changes: Any) -> Any:
    """Return a random model in float32 and eval mode, without EOS so that text has full length."""
    import transformers

    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    config_class = getattr(transformers, architecture.config_class)
    if is_dataclass(config_class):
        known = {f.name for f in fields(config_class)}
    else:  # up to Transformers 5.3
        known = set(signature(config_class.__init__).parameters)
    known -= architecture.options.keys()
    common = {key: value for key, value in COMMON.items() if key in known}
    given = {k: v for k, v in (architecture.options | changes).items() if v is not None}
    config = config_class(**common | given)
    model = getattr(transformers, architecture.model_class)(config).float().eval()
    for parameter in model.parameters():  # initial weights too small for varied text
        if parameter.ndim == 2 and parameter.std() < 0.1:
            torch.nn.init.normal_(parameter, std=0.4)
    model.generation_config.eos_token_id = None
    return model
