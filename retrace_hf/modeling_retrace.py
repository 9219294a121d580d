"""The drafter: a DFlash backbone whose block may be conditioned on a rejected trajectory."""

import copy
import os
from collections.abc import Callable, Sequence
from functools import wraps

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import DFlashCache
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.utils import find_adapter_config_file

from .candidate_generator import RetraceCandidateGenerator
from .configuration_retrace import CONTEXT_FIELDS, READS_TARGET_KV, RetraceConfig, check_fields
from .context import (
    HybridGate,
    LayerwiseFusion,
    TargetProjection,
    check_target_layer_ids,
    default_target_layer_ids,
    split_heads,
    split_rows,
    unrotate_keys,
)
from .draft_vocabulary import as_token_ids, check_token_ids
from .generation import install_generate_hook
from .hub import AUTO_MAP, complete_folder, plain_hub_errors, read_card, write_code
from .positions import GROWING_ROPES, ItemSlotEmbedding, StepEmbedding
from .trajectory import RejectedTrajectory, TrajectoryFusion, overwrite_embeds


class RetraceRMSNorm(Qwen3RMSNorm):
    pass


class RetraceRotaryEmbedding(Qwen3RotaryEmbedding):
    """Qwen3's, and the first `partial_rotary_factor` share of the head for targets that rotate only that."""

    @staticmethod
    def compute_default_rope_parameters(config: RetraceConfig, **kwargs) -> tuple[torch.Tensor, float]:
        rotary_dim = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0

    def _apply(self, fn, recurse: bool = True):
        # What moves a drafter may also cast it, from_dflash() for one: rounded frequencies would be those of no saved
        # drafter, and off by whole turns at late positions.
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = getattr(self, name)
            if moved.dtype != buffer.dtype and not buffer.is_meta:
                setattr(self, name, buffer.to(moved.device))
        return self

    def forward(self, x: torch.Tensor, position_ids: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.rope_type not in GROWING_ROPES:
            return super().forward(x, position_ids)
        # Qwen3's writes these into its buffers, where they outlast the call and meet those of another thread.
        length = int(position_ids.max()) + 1
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[self.rope_type](self.config, x.device, seq_len=length)
        angles = position_ids[..., None].float() * inv_freq.to(device=x.device, dtype=torch.float)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies RoPE to the leading `cos.shape[-1]` channels of `states` (`[b, heads, n, head_dim]`)."""
    rotary_dim = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned, kept = states[..., :rotary_dim], states[..., rotary_dim:]
    turned = turned * cos + rotate_half(turned) * sin
    return torch.cat([turned, kept], dim=-1) if kept.shape[-1] else turned


class RetraceAttention(nn.Module):
    """Block queries over context and block.

    Where the context's K and V come from is `config.context_fusion`: the block's own projections of the shared context
    (DFlash), projections of its own (`k_proj_target`, `v_proj_target`) of a mixture of taps (DFlare), or such ones of
    the target's cached K and V (KVShot). `"hybrid"` attends twice, over DFlash's context and over the target's K and
    V, the block's own K and V behind each, and joins the two by a gate."""

    def __init__(self, config: RetraceConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.fusion = config.context_fusion
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = False
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        if self.fusion == "layerwise":
            self.k_proj_target = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
            self.v_proj_target = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        elif self.fusion in READS_TARGET_KV:
            self.k_proj_target = TargetProjection(config, layer_idx)
            self.v_proj_target = TargetProjection(config, layer_idx)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RetraceRMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RetraceRMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.hybrid_gate = HybridGate(config.hidden_size) if self.fusion == "hybrid" else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor | None,
        target_kv: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | Callable | None = None,
        cache: DFlashCache | None = None,
        **kwargs,
    ) -> torch.Tensor:
        batch_size, query_length, _ = hidden_states.shape
        cos, sin = position_embeddings  # [b, n + Q, rotary_dim]; the block's positions are the last Q
        queries = self.q_norm(self.q_proj(hidden_states).view(batch_size, query_length, -1, self.head_dim))
        queries = rotate(queries.transpose(1, 2), cos[:, -query_length:], sin[:, -query_length:])
        if self.fusion == "kv":
            context = hidden_states[:, :0]  # the states of the block alone are projected here
        keys, values = self._project(context.to(hidden_states.dtype), hidden_states)
        keys = rotate(keys, cos[:, -keys.shape[2] :], sin[:, -keys.shape[2] :])
        if self.fusion in READS_TARGET_KV:
            own = keys[:, :, -query_length:], values[:, :, -query_length:]
            over_target = self._behind_target(target_kv, *own, cos, sin)

        def attend(keys: torch.Tensor, values: torch.Tensor, stream: int) -> torch.Tensor:
            if cache is not None:
                # Context and block go in; the caller crops the block's B rows before the next round.
                keys, values = cache.update(keys, values, stream)
            if callable(attention_mask):
                out = attention_mask(queries, keys, values, self.scaling)
                return self.o_proj(out.flatten(2))
            function: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, eager_attention_forward
            )
            out, _ = function(
                self,
                queries,
                keys,
                values,
                attention_mask,
                dropout=self.attention_dropout if self.training else 0.0,
                scaling=self.scaling,
                **kwargs,
            )
            return self.o_proj(out.reshape(batch_size, query_length, -1).contiguous())

        if self.fusion == "kv":
            return attend(*over_target, self.layer_idx)
        out = attend(keys, values, self.layer_idx)
        if self.hybrid_gate is None:
            return out
        return self.hybrid_gate(out, attend(*over_target, self.config.num_hidden_layers + self.layer_idx))

    def _project(self, context: torch.Tensor, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K (before RoPE) and V of the context's states `[b, n, D]` and of the block behind them,
        `[b, heads, n + Q, head_dim]`."""
        if self.fusion == "layerwise":
            keys = torch.cat([self.k_proj_target(context), self.k_proj(hidden_states)], dim=1)
            values = torch.cat([self.v_proj_target(context), self.v_proj(hidden_states)], dim=1)
        else:
            both = torch.cat([context, hidden_states], dim=1)  # [b, n + Q, D]
            keys, values = self.k_proj(both), self.v_proj(both)
        keys = self.k_norm(keys.view(*keys.shape[:2], -1, self.head_dim)).transpose(1, 2)
        return keys, split_heads(values, self.head_dim)

    def _behind_target(self, target_kv, keys, values, cos, sin) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the verified tokens, made from the target's own `[b, n, 2 * Ls * d_kv]`, and the block's behind
        them."""
        target_keys, target_values = target_kv.to(values.dtype).chunk(2, dim=-1)
        target_keys = split_heads(self.k_proj_target(target_keys), self.head_dim)
        target_values = split_heads(self.v_proj_target(target_values), self.head_dim)
        if self.config.context_kv_rope == "reapplied":
            length = target_kv.shape[1]
            target_keys = rotate(target_keys, cos[:, :length], sin[:, :length])
        return torch.cat([target_keys, keys], dim=2), torch.cat([target_values, values], dim=2)


class RetraceDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: RetraceConfig, layer_idx: int):
        super().__init__()
        self.self_attn = RetraceAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = RetraceRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RetraceRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor | None,
        target_kv: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        # The context passes through no input norm: hidden_norm has normalised it already.
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(normed, context, target_kv, **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class RetracePreTrainedModel(PreTrainedModel):
    config_class = RetraceConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    input_modalities = ("text",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["RetraceDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        # transformers' init functions leave alone what a checkpoint has filled.
        start = getattr(module, "start", None)
        if start is None:
            super()._init_weights(module)
        else:
            init.copy_(module.weight, start(module.weight))


def _check_is_retrace(path, kwargs: dict) -> None:
    """Raises where there is no checkpoint, or one of another kind, which `from_pretrained` would load as if it were a
    drafter.

    This reads config.json once more than transformers does. The config class could check what it reads, but for a
    path that is nowhere transformers fails before that, with a word about the form of Hub ids.
    """
    options = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download", "proxies")
    found = {k: kwargs[k] for k in options if k in kwargs}
    try:
        raw, _ = RetraceConfig.get_config_dict(path, **found)
    except OSError as error:
        raise OSError(
            f"There is no drafter in {path}: it is no folder with a config.json here ({os.getcwd()}), and the Hub did "
            f"not give it ({str(error).strip().splitlines()[0]})."
        ) from error
    if not raw and find_adapter_config_file(path, **found) is not None:
        return  # transformers opens the base that the adapter names
    if not raw:
        raise ValueError(f"{path} holds no config.json, so there is no drafter in it.")
    if raw.get("model_type") != RetraceConfig.model_type:
        raise ValueError(
            f"{path} is a checkpoint of model_type {raw.get('model_type')!r}, not a retrace drafter; a DFlash one is "
            "opened with RetraceDrafter.from_dflash()."
        )


def _check_has_tokenizer(path) -> None:
    """Raises where a pipeline was given a drafter's folder without the tokenizer that it reads there next."""
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "tokenizer_config.json")):
        raise ValueError(
            f"A pipeline also reads a tokenizer from {path}, and there is none; save the target's there "
            "(tokenizer.save_pretrained), or pass the loaded drafter as assistant_model."
        )


def _with_gradient(context: torch.Tensor | None) -> torch.Tensor | None:
    if context is None or context.requires_grad:
        return context
    return context.detach().requires_grad_(torch.is_grad_enabled())


def _draft_vocab_size(draft_token_ids: Sequence[int] | None, config: dict) -> dict:
    """The field that a table of tokens sets; raises where it is set without one."""
    if draft_token_ids is not None:
        return {"draft_vocab_size": len(set(map(int, draft_token_ids)))}
    if config.get("draft_vocab_size") is not None:
        raise ValueError(
            f"draft_vocab_size is {config['draft_vocab_size']} and no draft_token_ids say which tokens these are; "
            "pass them alone, for instance draft_vocabulary.most_frequent_tokens(dataset, size)."
        )
    return {}


class RetraceDrafter(RetracePreTrainedModel):
    r"""
    A drafter for one target. It has no embedding and no LM head: `generate()` lends it the target's.

    ```python
    drafter = RetraceDrafter.from_pretrained("org/retrace-qwen3-8b")
    target.generate(**inputs, assistant_model=drafter)
    ```

    Source: DFlash, arXiv 2602.06036 (backbone); ReTrace, arXiv 2608.29748 (`trajectory`).
    """

    def __init__(self, config: RetraceConfig):
        super().__init__(config)
        config.check()  # from_pretrained sets fields after the config has been checked
        if config.mask_token_id is None:
            raise ValueError("mask_token_id is missing; name an unused special token of the target's tokenizer.")
        if config.num_target_layers is None:
            raise ValueError("num_target_layers is missing; it is the target's num_hidden_layers.")
        if config.context_fusion != "kv":
            check_target_layer_ids(config.target_layer_ids, config.num_target_layers)
            taps = len(config.target_layer_ids)
            if config.context_fusion == "layerwise":
                self.layer_fusion = LayerwiseFusion(config.num_hidden_layers, taps)
            else:
                self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
            self.hidden_norm = RetraceRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(RetraceDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RetraceRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RetraceRotaryEmbedding(config)
        self.trajectory = TrajectoryFusion(config) if config.conditioning in ("gated", "corrected") else None
        self.item_slot_embedding = ItemSlotEmbedding(config) if config.item_slots else None
        self.step_embedding = StepEmbedding(config) if config.step_embeddings else None
        # Of a new drafter the first tokens, until it is told which.
        tokens = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_token_ids", tokens)
        self._built_for = {name: copy.copy(getattr(config, name)) for name in CONTEXT_FIELDS}
        self.gradient_checkpointing = False
        self.add_model_tags(["retrace", "speculative-decoding"])
        self.post_init()

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | Callable | None = None,
        cache: DFlashCache | None = None,
        trajectory: RejectedTrajectory | None = None,
        item_slot_ids: torch.LongTensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        r"""
        Args:
            noise_embeds (`torch.Tensor` of shape `[b, Q, D]`):
                Target embeddings of the block(s): anchor, then masks. Q = B in generation, N * B in training.
            context_hidden_states (`torch.Tensor` of shape `[b, n, C]`):
                Rows of the verified tokens that are not in `cache` yet, strictly before the anchor: tapped target
                states, C = F * D, and what else `config.context_fusion` reads (`context.py`).
            position_ids (`torch.LongTensor` of shape `[b, n + Q]`, *optional*):
                Positions of context and block. By default they follow what is cached.
            attention_mask (`torch.Tensor`, *optional*):
                2-D over cached, context and block positions (1: attend), or 4-D `[b, 1, Q, cached + n + Q]` as the
                attention implementation takes it (bool for SDPA, a `BlockMask` for flex_attention), or a function of
                queries, keys, values and their scaling that attends in its place and returns `[b, Q, heads,
                head_dim]` (training's). By default all is seen.
            cache (`DFlashCache`, *optional*):
                Context K/V; context and block are appended, the caller crops the block.
            trajectory ([`RejectedTrajectory`], *optional*):
                Aligned signal of the last round, `[b, Q, ...]`. Ignored where `config.conditioning` is `"none"`.
            item_slot_ids (`torch.LongTensor` of shape `[b, Q]`, *optional*):
                At which slot of an item each slot stands, as `positions.block_item_slots` gives it; -1: not known.
                Ignored where `config.item_slots` is 0. Without it (transformers' own generator passes none) the
                drafter drafts as if nothing were known.

        Returns:
            `BaseModelOutputWithPast`: `last_hidden_state` of shape `[b, Q, D]` after the final norm, for the target's
            LM head. Slot 0's is not used.
        """
        hidden_states = self._admit(self._place(noise_embeds, item_slot_ids), trajectory)
        taps, target_kv = split_rows(context_hidden_states, self.config)
        contexts = self._contexts(taps)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            length = taps.shape[1] + noise_embeds.shape[1]
            position_ids = torch.arange(seen, seen + length, device=noise_embeds.device)[None]
        mask = attention_mask
        if not callable(mask):
            if mask is None or len(mask.shape) == 2:
                mask = self._within_window(mask, noise_embeds, taps, cache)
            mask = create_bidirectional_mask(
                config=self.config, inputs_embeds=noise_embeds, attention_mask=mask, cache=cache
            )
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        if self.config.context_kv_rope == "reapplied":
            before_block = (turn[:, : taps.shape[1]] for turn in position_embeddings)
            target_kv = unrotate_keys(target_kv, *before_block, self.config.target_head_dim)
        if self.gradient_checkpointing and self.training:
            # A reentrant checkpoint gives its layer no gradients unless an input has one (fc and hidden_norm frozen).
            contexts = [_with_gradient(context) for context in contexts]
            target_kv = _with_gradient(target_kv) if self.config.context_fusion == "kv" else target_kv
        for layer, context in zip(self.layers, contexts):
            hidden_states = layer(
                hidden_states,
                context,
                target_kv,
                position_embeddings=position_embeddings,
                attention_mask=mask,
                cache=cache,
            )
        if self.config.step_embeddings:
            hidden_states = self._required("step_embedding", "step_embeddings")(hidden_states, self.config.block_size)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)

    def _contexts(self, taps: torch.Tensor) -> list[torch.Tensor | None]:
        """The fused context `[b, n, D]` that each layer reads; `None` where none reads tapped states."""
        if self.config.context_fusion == "kv":
            return [None] * len(self.layers)
        if self.config.context_fusion == "layerwise":
            return [self.hidden_norm(mixture) for mixture in self.layer_fusion(taps)]
        return [self.hidden_norm(self.fc(taps))] * len(self.layers)

    def _within_window(self, mask, noise_embeds, context, cache) -> torch.Tensor | None:
        """The 2-D mask, or none, with context hidden that lies before `config.context_window`."""
        seen = cache.get_seq_length() if cache is not None else 0
        batch_size, length = noise_embeds.shape[0], seen + context.shape[1]
        window = self.config.context_window
        if window is None or length <= window:
            return mask
        near = torch.arange(length + noise_embeds.shape[1], device=noise_embeds.device) >= length - window
        return near.expand(batch_size, -1) if mask is None else mask.bool() & near

    def _place(self, noise_embeds: torch.Tensor, item_slot_ids: torch.LongTensor | None) -> torch.Tensor:
        """Input embeddings of the block that know at which slot of an item they stand, `[b, Q, D]`."""
        if item_slot_ids is None or not self.config.item_slots:
            return noise_embeds
        return self._required("item_slot_embedding", "item_slots")(noise_embeds, item_slot_ids)

    def check_modules(self) -> None:
        """Raises a ValueError if the config, whose fields may be set on a loaded drafter, asks for what it lacks."""
        self.config.check()
        for name, built in self._built_for.items():
            value = getattr(self.config, name)
            if value != built:
                raise ValueError(
                    f"{name} was set to {value!r} on a drafter that was made with {built!r}, whose weights read that; "
                    f"set it back, or make another drafter with from_target() or from_dflash(..., {name}={value!r})."
                )
        if self.config.item_slots:
            rows = self._required("item_slot_embedding", "item_slots").table.num_embeddings
            wanted = self.config.item_slots + (self.config.item_separator_id is not None)
            if rows != wanted:
                raise ValueError(
                    f"item_slots={self.config.item_slots} and item_separator_id={self.config.item_separator_id} need "
                    f"{wanted} rows and this checkpoint has {rows}; set them as it was trained, or item_slots to 0."
                )
        if self.config.step_embeddings:
            self._required("step_embedding", "step_embeddings")
        size = self.config.draft_vocab_size
        if size is not None and (self.draft_token_ids is None or len(self.draft_token_ids) != size):
            found = "no draft_token_ids" if self.draft_token_ids is None else f"{len(self.draft_token_ids)} of them"
            raise ValueError(
                f"draft_vocab_size is {size} and the drafter has {found}; set it as it was, or to None to draft among "
                "all tokens, or open it with RetraceDrafter.from_dflash(..., draft_token_ids=...)."
            )

    def set_draft_token_ids(self, tokens: Sequence[int]) -> None:
        """Writes the table of a drafter that was made with `draft_vocab_size`. Raises a ValueError for what are not
        that many tokens of the target."""
        token_ids = as_token_ids(tokens, self.config.vocab_size)
        if len(token_ids) != self.config.draft_vocab_size:
            raise ValueError(
                f"draft_token_ids holds {len(token_ids)} different tokens and draft_vocab_size is "
                f"{self.config.draft_vocab_size}; leave out draft_vocab_size, it is their number."
            )
        self.draft_token_ids.copy_(token_ids)

    def _required(self, name: str, field: str) -> nn.Module:
        """The module that a field of the config asks for, which may have been set on a loaded drafter."""
        module = getattr(self, name)
        if module is None:
            raise ValueError(
                f"{field}={getattr(self.config, field)!r} needs {name}, which this checkpoint lacks; open it with "
                f"RetraceDrafter.from_dflash(..., {field}={getattr(self.config, field)!r}) to add the module, then "
                "train it."
            )
        return module

    def _admit(self, noise_embeds: torch.Tensor, trajectory: RejectedTrajectory | None) -> torch.Tensor:
        """Input embeddings of the block after the rejected trajectory has entered, `[b, Q, D]`."""
        conditioning = self.config.conditioning
        if trajectory is None or conditioning == "none":
            return noise_embeds
        if conditioning == "overwrite":
            return overwrite_embeds(noise_embeds, trajectory)
        needed = "correction" if conditioning == "corrected" else "gate"
        if getattr(self.trajectory, needed, None) is None:
            raise ValueError(
                f"conditioning={conditioning!r} needs trajectory.{needed}, which this checkpoint lacks; open it with "
                f"RetraceDrafter.from_dflash(..., conditioning={conditioning!r}) to add the module, then train it."
            )
        return self.trajectory(noise_embeds, trajectory, corrected=conditioning == "corrected")

    def get_input_embeddings(self) -> None:
        """None: `generate()` lends it the target's. What asks (FSDP2 does) would otherwise fail."""
        return None

    # -- where drafters come from ------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """As in transformers, but strict: a checkpoint that lacks a key or brings an unknown one raises.

        Raises:
            ValueError: keys are missing, unknown, or of another shape; nothing is silently re-initialised.
        """
        _check_is_retrace(pretrained_model_name_or_path, kwargs)
        if "_from_pipeline" in kwargs:
            _check_has_tokenizer(pretrained_model_name_or_path)
        # Mismatched shapes are let through only to be named below.
        kwargs.update(output_loading_info=True, ignore_mismatched_sizes=True)
        drafter, info = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        faults = [
            f"{kind}: {sorted(map(str, info[name]))}"
            for name, kind in (
                ("missing_keys", "missing"),
                ("unexpected_keys", "unknown"),
                ("mismatched_keys", "shape"),
            )
            if info.get(name)
        ]
        if faults:
            raise ValueError(
                f"{pretrained_model_name_or_path} does not fit its config ({'; '.join(faults)}). A DFlash checkpoint "
                "is opened with RetraceDrafter.from_dflash(); to switch the signal of a ReTrace off, set "
                "drafter.config.conditioning = 'none' after loading."
            )
        if drafter.draft_token_ids is not None:
            check_token_ids(drafter.draft_token_ids, drafter.config.vocab_size)
        return (drafter, info) if output_loading_info else drafter

    def save_pretrained(self, save_directory, is_main_process: bool = True, *args, **kwargs):
        """As in transformers, with the code beside weights and config that a load with `trust_remote_code` needs where
        this package is not installed. With `push_to_hub=True` the card goes up in the same commit."""
        self.config.auto_map = dict(AUTO_MAP)
        self._card_before = read_card(save_directory)  # upstream writes over it before it uploads
        with plain_hub_errors(kwargs.get("repo_id", save_directory)):
            super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if is_main_process:
            write_code(save_directory)

    @wraps(PreTrainedModel.push_to_hub)
    def push_to_hub(self, repo_id: str, *args, **kwargs):
        with plain_hub_errors(repo_id):
            return super().push_to_hub(repo_id, *args, **kwargs)

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        # save_pretrained(push_to_hub=True) and push_to_hub() come here with weights, config and some card.
        complete_folder(working_dir, self, repo_id, self._card_before)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        mask_token_id: int | None = None,
        num_hidden_layers: int = 5,
        block_size: int = 16,
        target_layer_ids: list[int] | None = None,
        init_from_target: bool = False,
        draft_token_ids: Sequence[int] | None = None,
        **config,
    ) -> "RetraceDrafter":
        """An untrained drafter shaped for `target`, in float32 on its device.

        Args:
            target (`PreTrainedModel`): A decoder-only model with an LM head.
            mask_token_id (`int`): Token for the slots to be drafted; an unused special token. Required.
            num_hidden_layers (`int`, defaults to 5): Draft layers.
            block_size (`int`, defaults to 16): Slots of a block.
            target_layer_ids (`list[int]`, *optional*):
                Tapped layers; by default as many as draft layers, spread as DFlash does. Not for
                `context_fusion="kv"`, which takes `target_kv_layer_ids` (as `"hybrid"` does), 3 by default.
            init_from_target (`bool`, defaults to `False`):
                Start the draft layers from the target's last layers and the context from its last tap, where the
                target's layers are of the Llama / Qwen shape (see `initialization.py`).
            draft_token_ids (sequence of `int`, *optional*):
                The target's tokens among which is drafted, such as [`~draft_vocabulary.most_frequent_tokens`] gives
                them; all by default.
            config: Other fields of [`RetraceConfig`], e.g. `conditioning`, `context_fusion`.

        Raises:
            ValueError: no mask token, a field that the config does not have, or a target that a block drafter cannot
                serve, or not with this context.
        """
        from .initialization import check_kv_reading, config_for_target, initialize_from_target

        check_fields(config)
        config |= _draft_vocab_size(draft_token_ids, config)
        drafter = cls(
            config_for_target(
                target,
                mask_token_id=mask_token_id,
                num_hidden_layers=num_hidden_layers,
                block_size=block_size,
                target_layer_ids=target_layer_ids,
                **config,
            )
        )
        if draft_token_ids is not None:
            drafter.set_draft_token_ids(draft_token_ids)
        drafter = drafter.to(device=target.get_input_embeddings().weight.device, dtype=torch.float32)
        check_kv_reading(drafter, target)
        if init_from_target:
            initialize_from_target(drafter, target)
        return drafter

    @classmethod
    def from_dflash(
        cls,
        path_or_model,
        target: PreTrainedModel | None = None,
        context_rows: torch.Tensor | None = None,
        draft_token_ids: Sequence[int] | None = None,
        **config,
    ) -> "RetraceDrafter":
        """Opens a DFlash drafter as the start of a ReTrace: the backbone key for key, new modules initialised.

        A ReTrace may be the start too. With its own `conditioning` it goes on as it was trained, modules of the signal
        included; with `"none"` these go, and what is left is the DFlash backbone; with another one the modules of that
        one are new, and a warning says so.

        With another `context_fusion` than the checkpoint's the backbone is kept and the context starts so:

        - `"hybrid"`: the checkpoint's own, key for key, and attention over the target's K/V beside it whose share
          starts at zero. It drafts as the checkpoint does, bit for bit, until it is trained.
        - `"layerwise"`: DFlash's context is a full matrix for each tap, DFlare's a scalar. The mixture starts as
          DFlare's; `k_proj_target`, `v_proj_target` are `k_proj`, `v_proj` behind the one matrix that is nearest to
          what `fc` does to the mixed taps: by least squares on `context_rows` where they are given, else on the
          weights alone, as if the taps were white noise. See `initialization.py`.
        - `"kv"`: queries, block projections and MLPs are kept, `fc` and `hidden_norm` go. The projections pick the
          target's own keys and values, which these queries have never seen.

        Args:
            path_or_model (`str`, `os.PathLike` or `PreTrainedModel`):
                A Hub id or folder in the layout of z-lab, of transformers itself, of speculators, or our own (any
                `context_fusion`, which is kept); or such a model.
            target (`PreTrainedModel`, *optional*):
                The target, for `"kv"` and `"hybrid"`: the shape of its keys and values is read from it. Else pass
                `target_kv_layer_ids`, `target_num_key_value_heads` and `target_head_dim`. Also gives
                `num_target_layers` and `vocab_size` where the checkpoint does not say them.
            context_rows (`torch.Tensor` of shape `[n, F * D]`, *optional*):
                Tapped states of some text, for the start of `"layerwise"`.
            draft_token_ids (sequence of `int`, *optional*):
                The target's tokens among which is drafted; the checkpoint's by default. `draft_vocab_size=None` drops
                the checkpoint's, so that all are drafted.
            config: Fields of [`RetraceConfig`] to set, e.g. `conditioning` (default `"corrected"`, whatever the
                checkpoint's is).

        Raises:
            ValueError: another layout, an unknown field, keys that do not match the backbone, or a
                context that the checkpoint's cannot become.
        """
        from .conversion import (
            TOKEN_TABLE,
            changed_fusion,
            check_same_context,
            complete_from_target,
            keep_signal,
            load_backbone,
            load_dflash,
        )
        from .initialization import check_kv_reading, start_from_shared

        check_fields(config)
        fields, state = load_dflash(path_or_model)
        config = {"conditioning": "corrected", **config, **_draft_vocab_size(draft_token_ids, config)}
        state = keep_signal(state, fields["conditioning"], config["conditioning"])
        if draft_token_ids is not None:
            state[TOKEN_TABLE] = as_token_ids(draft_token_ids, fields.get("vocab_size", RetraceConfig.vocab_size))
        elif config.get("draft_vocab_size", ...) is None:
            state.pop(TOKEN_TABLE, None)
        if target is not None:
            fields = complete_from_target(fields, target.config)
        source = fields.get("context_fusion", "shared")
        wanted = config.get("context_fusion", source)
        check_same_context(fields, config, source, wanted)
        if context_rows is not None and (wanted == source or wanted != "layerwise"):
            raise ValueError(
                f"context_rows is for context_fusion='layerwise' made of another; here {source!r} becomes "
                f"{wanted!r}, leave it out."
            )
        if wanted == source:
            drafter = cls(RetraceConfig(**{**fields, **config}))
            load_backbone(drafter, state)
            return drafter
        changed = changed_fusion({**fields, **config}, source, target)
        kept = {k: v for k, v in config.items() if k not in CONTEXT_FIELDS}
        if not any(name.startswith("trajectory.") for name in state):
            kept["conditioning"] = "none"
        dflash = cls(RetraceConfig(**{**fields, **kept}))
        load_backbone(dflash, state)
        drafter = cls(RetraceConfig(**changed))
        if target is not None:
            check_kv_reading(drafter, target)
        start_from_shared(drafter, dflash, context_rows)
        return drafter.to(dflash.dtype).eval()

    # -- generate() --------------------------------------------------------------------------------------------------

    @property
    def proposal(self) -> str:
        """`config.proposal`, to read and to set."""
        return self.config.proposal

    @proposal.setter
    def proposal(self, policy: str):
        self.config.proposal = policy

    def get_candidate_generator(self, target, generation_config, logits_processor, stopping_criteria, model_kwargs):
        """The generator of one `generate()` call. This method is how the hook recognises a drafter."""
        return RetraceCandidateGenerator(
            drafter=self,
            target=target,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            model_kwargs=model_kwargs,
        )


# A load with trust_remote_code imports this file and no package.
install_generate_hook()

__all__ = ["RetraceDrafter", "RetracePreTrainedModel", "default_target_layer_ids"]
