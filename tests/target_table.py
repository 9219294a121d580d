"""Which target families are served and which are refused: one row each, for the tests and for the README.

`python -m tests.target_table` prints the README's table.
"""

from dataclasses import dataclass, field

import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM


VOCAB_SIZE = 200

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    # Large weights: with the default scale greedy text of a random model repeats one token.
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Shorter than the longest prompts of the tests, so that windows slide, and chunks end, in the prompt and behind it.
WINDOW = 12
_WINDOWED = {"sliding_window": WINDOW}

DENSE, BIASED, SLIDING = "Dense, rotary positions", "Biased head or projections, partial rotary", "Sliding windows"
SCALED, EXPERTS, CHUNKED = "Scaled or softcapped logits", "Mixture of experts", "Chunked attention"
LEARNED, ALIBI, IMAGE = "Learned positions", "ALiBi", "Image and text"
HYBRID, RECURRENT = "Attention with recurrent or convolution layers", "Recurrent layers alone"
OWN_STATE, SEQ2SEQ = "Recurrent state that cannot be kept back", "Encoder-decoder"
KEEPS_STATES = Version(transformers.__version__) >= Version("5.25")


@dataclass(frozen=True)
class Family:
    """One kind of target.

    Args:
        kind (`str`): Row of the README's table.
        title (`str`): As it is called there.
        model_type (`str`): As transformers calls its config.
        fields (`dict`): What its tiny config has beyond the common shape, `None` to leave a field of that out.
        always_refused (`str`, *optional*): The error of `generate()` and `from_target`, a regular expression.
        since (`str`, *optional*): The first transformers that serves it, where the oldest supported one refuses it.
        untrainable (`str`, *optional*): The error of training with verification, a regular expression.
    """

    kind: str
    title: str
    model_type: str
    fields: dict = field(default_factory=dict)
    always_refused: str | None = None
    since: str | None = None
    untrainable: str | None = None

    @property
    def refused(self) -> str | None:
        """The error with the transformers that is installed."""
        return _BEFORE if self.since and not KEEPS_STATES else self.always_refused

    def config(self, **overrides):
        """A tiny config; a field that is `None` in `fields` is left to the family's own default."""
        given = {**_SHAPE, **self.fields, **overrides}
        left_out = {k for k, v in self.fields.items() if v is None and k not in overrides and k in _SHAPE}
        given = {k: v for k, v in given.items() if k not in left_out}
        if self.has_images:
            outer = {k: given.pop(k) for k in self.fields}
            text = {**given, **outer.pop("text_config")}
            return CONFIG_MAPPING[self.model_type](text_config=text, tie_word_embeddings=False, **outer)
        return CONFIG_MAPPING[self.model_type](**given)

    @property
    def has_images(self) -> bool:
        return "vision_config" in self.fields

    @property
    def auto_class(self):
        if self.has_images:
            return AutoModelForImageTextToText
        return AutoModelForSeq2SeqLM if self.kind == SEQ2SEQ else AutoModelForCausalLM


_BEFORE = "cannot be rolled back after a rejected draft with transformers .*install transformers>=5.25"
_STATE = "rolled back after a rejected draft.*generate without assistant_model"
_MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_DELTA_NET = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
_DELTA_NET |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
_NO_ATTENTION = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "max_position_embeddings"))
# Chunks that end in the prompts of the tests; whole ones of 256 tokens are work for nothing.
_MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
_IMAGE_TOKENS = {
    "image_token_id": 190,
    "video_token_id": 191,
    "vision_start_token_id": 192,
    "vision_end_token_id": 193,
}
_VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
_VISION |= {"temporal_patch_size": 1, "spatial_merge_size": 2, "out_hidden_size": 32}
_TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_TOWER |= {"image_size": 16, "patch_size": 4}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}

_ROWS = [
    Family(DENSE, "Llama", "llama"),
    Family(DENSE, "Qwen3", "qwen3"),
    Family(DENSE, "Mistral", "mistral", {"sliding_window": None}),
    Family(DENSE, "SmolLM3", "smollm3"),
    Family(DENSE, "OLMo 2", "olmo2"),
    Family(DENSE, "GLM-4", "glm4"),
    Family(BIASED, "Qwen2", "qwen2"),
    Family(BIASED, "Phi", "phi", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    Family(BIASED, "Phi-3", "phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    Family(BIASED, "StarCoder2", "starcoder2", {"sliding_window": None}),
    Family(BIASED, "GPT-NeoX", "gpt_neox"),
    # A softcap on the logits, and layers whose window is shorter than most prompts.
    Family(
        SCALED, "Gemma 2", "gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}
    ),
    Family(SCALED, "Granite", "granite", {"logits_scaling": 4.0, "embedding_multiplier": 2.0}),
    Family(SCALED, "Cohere", "cohere", {"logit_scale": 0.25}),
    Family(SLIDING, "Gemma 3", "gemma3_text", {**_WINDOWED, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}),
    Family(SLIDING, "Mistral with a window", "mistral", _WINDOWED),
    Family(SLIDING, "Cohere 2", "cohere2", {**_WINDOWED, "logit_scale": 0.25}),
    Family(SLIDING, "OLMo 3", "olmo3", _WINDOWED),
    Family(
        EXPERTS, "Qwen3-MoE", "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    ),
    Family(EXPERTS, "Mixtral", "mixtral", _EXPERTS),
    Family(EXPERTS, "gpt-oss", "gpt_oss", {**_EXPERTS, **_WINDOWED}),
    Family(
        CHUNKED,
        "Llama 4 (text)",
        "llama4_text",
        {
            "attention_chunk_size": WINDOW,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
        },
        untrainable="cannot verify drafted blocks in training.*chunked_attention.*gated",
    ),
    Family(LEARNED, "GPT-2", "gpt2"),
    Family(
        LEARNED,
        "OPT",
        "opt",
        {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.25, "tie_word_embeddings": False},
    ),
    Family(
        ALIBI,
        "BLOOM",
        "bloom",
        {"tie_word_embeddings": False},
        untrainable="BloomForCausalLM cannot verify drafted blocks.*gated",
    ),
    Family(
        IMAGE,
        "Qwen2.5-VL",
        "qwen2_5_vl",
        {
            "vision_config": {**_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
            "text_config": {"rope_parameters": _MROPE},
            **_IMAGE_TOKENS,
        },
    ),
    Family(
        IMAGE,
        "Qwen3-VL",
        "qwen3_vl",
        {
            "vision_config": {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            "text_config": {"rope_parameters": _MROPE | {"mrope_interleaved": True}},
            **_IMAGE_TOKENS,
        },
    ),
    Family(
        IMAGE,
        "Gemma 3",
        "gemma3",
        {
            "vision_config": _TOWER,
            "text_config": {"model_type": "gemma3_text", **_WINDOWED, "query_pre_attn_scalar": 8},
            "mm_tokens_per_image": 4,
            "image_token_index": 190,
            "boi_token_index": 191,
            "eoi_token_index": 192,
        },
    ),
    Family(
        IMAGE,
        "LLaVA",
        "llava",
        {
            "vision_config": {"model_type": "clip_vision_model", **_TOWER},
            "text_config": {"model_type": "llama"},
            "image_token_index": 190,
        },
    ),
    Family(HYBRID, "Qwen3-Next", "qwen3_next", {**_MOE, **_DELTA_NET}, since="5.25"),
    Family(HYBRID, "Qwen3.5 (text)", "qwen3_5_text", _DELTA_NET, since="5.25"),
    Family(HYBRID, "Qwen3.5-MoE (text)", "qwen3_5_moe_text", {**_MOE, **_DELTA_NET}, since="5.25"),
    Family(
        HYBRID,
        "Qwen3.5",
        "qwen3_5",
        {
            "vision_config": {**_VISION, "num_position_embeddings": 16},
            "text_config": {"rope_parameters": _MROPE | {"mrope_interleaved": True}, **_DELTA_NET},
            **_IMAGE_TOKENS,
        },
        since="5.25",
    ),
    Family(HYBRID, "LFM2", "lfm2", {"layer_types": ["conv", "full_attention"] * 3}, since="5.25"),
    Family(
        HYBRID,
        "Granite 4 hybrid",
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "attention"] * 3,
            "shared_intermediate_size": 32,
            "logits_scaling": 4.0,
            **_EXPERTS,
            **_MAMBA_2,
        },
        since="5.25",
    ),
    Family(HYBRID, "Bamba", "bamba", {**_MAMBA_2, "attn_layer_indices": [1, 4]}, since="5.25"),
    Family(HYBRID, "Falcon-H1", "falcon_h1", {"mamba_d_ssm": 32, **_MAMBA_2, "mamba_n_heads": 4}, since="5.25"),
    Family(
        HYBRID,
        "Nemotron-H",
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "moe"] * 2,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 16,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
        since="5.25",
    ),
    Family(HYBRID, "Jamba", "jamba", {"num_experts": 2}, since="5.25"),
    Family(
        RECURRENT,
        "Mamba 2",
        "mamba2",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16, **_NO_ATTENTION},
        since="5.25",
    ),
    Family(OWN_STATE, "RecurrentGemma", "recurrent_gemma", {"lru_width": 32, "attention_window_size": 16}, _STATE),
    Family(
        OWN_STATE,
        "MiniMax",
        "minimax",
        {**_EXPERTS, "layer_types": ["linear_attention", "full_attention"] * 3},
        _STATE,
    ),
    Family(OWN_STATE, "Mamba", "mamba", always_refused=_STATE),
    Family(OWN_STATE, "RWKV", "rwkv", {"attention_hidden_size": 32}, _STATE),
    Family(SEQ2SEQ, "T5", "t5", always_refused="encoder-decoder.*decoder-only"),
    Family(SEQ2SEQ, "BART", "bart", always_refused="encoder-decoder.*decoder-only"),
]
# By model type; where one has two rows, the title's last word tells them apart.
FAMILIES = {}
for row in _ROWS:
    name = row.model_type if row.model_type not in FAMILIES else f"{row.model_type}_{row.title.split()[-1]}"
    FAMILIES[name] = row


def readme_table() -> str:
    """The README's table: by kind, what is served and what is not."""
    lines = ["| Targets | Tested | `generate()` | Training with verification |", "|---|---|---|---|"]
    for kind in dict.fromkeys(row.kind for row in _ROWS):
        rows = [row for row in _ROWS if row.kind == kind]
        titles = ", ".join(row.title for row in rows)
        served = "refused" if rows[0].always_refused else "equal to plain"
        served += f" (transformers >= {rows[0].since})" if rows[0].since else ""
        trained = "refused" if rows[0].always_refused or rows[0].untrainable else "equal to decoding"
        lines.append(f"| {kind} | {titles} | {served} | {trained} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(readme_table())
