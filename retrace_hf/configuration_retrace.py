"""Configuration of a ReTrace drafter."""

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


CONTEXT_FUSIONS = ("shared", "layerwise", "kv", "hybrid")
READS_TARGET_KV = ("kv", "hybrid")
CONTEXT_FIELDS = (
    *("context_fusion", "target_layer_ids", "target_kv_layer_ids", "target_num_key_value_heads", "target_head_dim"),
    "context_kv_rope",
)
CONTEXT_KV_ROPES = ("kept", "reapplied")
CONDITIONINGS = ("none", "overwrite", "gated", "corrected")
PROPOSALS = ("argmax", "sample")
ROPES = ("default", *sorted(ROPE_INIT_FUNCTIONS))
POSITIVE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "target_num_key_value_heads", "target_head_dim", "draft_vocab_size"),
)


@strict
class RetraceConfig(PreTrainedConfig):
    r"""
    Shape of a block-diffusion drafter (DFlash, arXiv 2602.06036) and what it is conditioned on
    (ReTrace, arXiv 2608.29748). Every way of looking at the world is one field.

    Args:
        vocab_size (`int`, defaults to 151936):
            Rows of the target's embedding. The drafter holds neither embedding nor LM head, it borrows the target's.
        hidden_size (`int`, defaults to 4096):
            Hidden size `D`, which is the target's.
        block_size (`int`, defaults to 16):
            Slots `B` of a block: the anchor in slot 0 and `B - 1` proposals.
        mask_token_id (`int`, *optional*):
            Token whose target embedding fills slots 1 to `B - 1`.
        target_layer_ids (`list[int]`, *optional*):
            0-based target layers whose outputs are the context, `hidden_states[id + 1]`. The last layer is not among
            them: transformers returns it after the final norm. Empty for `context_fusion="kv"`, which reads none.
        num_target_layers (`int`, *optional*):
            Layers of the target.
        context_window (`int`, *optional*):
            Verified tokens that a block sees at most, the last ones before its anchor and the same ones in every
            slot; all by default. Bounds the drafter's cache and its time a round on long texts.
        context_fusion (`str`, defaults to `"shared"`):
            How verified tokens become context. `"shared"`: one projection of the tapped states, read by all draft
            layers (DFlash). `"layerwise"`: a mixture of the tapped states for each draft layer, with projections of
            its own (DFlare). `"kv"`: keys and values that the target has cached, projected (KVShot). `"hybrid"`: both,
            joined by a gate.
        target_kv_layer_ids (`list[int]`, *optional*):
            0-based target layers whose cached keys and values `"kv"` and `"hybrid"` read. They must have full
            attention. `from_target` names 3 evenly spaced ones.
        target_num_key_value_heads (`int`, *optional*):
            Key/value heads of the target's layers; for `"kv"` and `"hybrid"`.
        target_head_dim (`int`, *optional*):
            Their head size; for `"kv"` and `"hybrid"`.
        context_kv_rope (`str`, defaults to `"kept"`):
            Whether the target's keys are projected as they lie in its cache, rotated by their position (`"kept"`), or
            RoPE is taken off, and put on again behind the projection (`"reapplied"`). The drafter's `rope_parameters`
            are the target's for that.
        conditioning (`str`, defaults to `"corrected"`):
            What the rejected suffix of the last round adds to the next block: `"none"` (DFlash), `"corrected"`
            (ReTrace), or its ablations `"gated"` (no correction by target states) and `"overwrite"` (rejected states
            replace the mask embeddings, no parameters). Read in each forward: setting it to `"none"` on a loaded
            drafter switches the signal off.
        proposal (`str`, defaults to `"argmax"`):
            What is proposed where `generate()` samples; the law of the text is the target's either way. `"argmax"`:
            each slot's most likely token. `"sample"`: drawn from the drafter's own law, which a drafter trained with
            soft targets may gain from. Read in each call, and saved: a published drafter brings its policy.
        draft_vocab_size (`int`, *optional*):
            Tokens among which is drafted, the drafter's `draft_token_ids`; all by default. Read in each call: setting
            it to `None` on a loaded drafter lets it draft among all.
        item_slots (`int`, defaults to 0):
            Tokens `K` of an item in generative recommendation, whose slots the drafter then tells apart (PAD-Rec);
            0: none. Read in each forward: setting it to 0 on a loaded drafter switches them off.
        item_token_ranges (`list[list[int]]`, *optional*):
            By slot of an item, the ids `[first, end)` of its tokens. Needed where `item_slots` is set; no id may stand
            in two of them, since an anchor's token alone says where in an item its block begins.
        item_separator_id (`int`, *optional*):
            Token behind each item, where there is one.
        step_embeddings (`bool`, defaults to `False`):
            Whether the drafter's last states are told how far from the anchor they stand (PAD-Rec). Read in each
            forward.

    The other fields are those of a Qwen3 layer.

    Raises:
        ValueError: a field has a value that no drafter can be built from.
    """

    model_type = "retrace"
    keys_to_ignore_at_inference = ["cache"]

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    layer_types: list[str] | None = None
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    block_size: int = 16
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    context_window: int | None = None
    context_fusion: str = "shared"
    target_kv_layer_ids: list[int] | None = None
    target_num_key_value_heads: int | None = None
    target_head_dim: int | None = None
    context_kv_rope: str = "kept"
    conditioning: str = "corrected"
    proposal: str = "argmax"
    draft_vocab_size: int | None = None
    item_slots: int = 0
    item_token_ranges: list | None = None
    item_separator_id: int | None = None
    step_embeddings: bool = False

    def __post_init__(self, **kwargs):
        self._check_positive()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Raises a ValueError if a field has a value that no drafter can be built from."""
        self._check_shape()
        self._check_context()
        self._check_axes()

    def _check_positive(self):
        for name in POSITIVE:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")

    def _check_shape(self):
        self._check_positive()
        rope = self.rope_parameters
        if rope.get("rope_type", "default") not in ROPES:
            raise ValueError(f"rope_parameters has rope_type {rope['rope_type']!r}; it must be one of {ROPES}.")
        if not 0 < rope.get("partial_rotary_factor", 1.0) <= 1:
            raise ValueError(
                f"rope_parameters has partial_rotary_factor {rope['partial_rotary_factor']}; it is the share of a "
                "head's channels that rotate, above 0 and at most 1."
            )
        if self.block_size < 2:
            raise ValueError(
                f"block_size is {self.block_size}; a block needs the anchor and at least one proposal (>= 2)."
            )
        if self.context_window is not None and self.context_window < 1:
            raise ValueError(
                f"context_window is {self.context_window}; a block needs at least one verified token, or None for all."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})."
            )
        if any(kind != "full_attention" for kind in self.layer_types):
            raise ValueError(
                f"layer_types is {self.layer_types}; every entry must be 'full_attention'. For draft layers that see "
                "only the last tokens set context_window."
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for num_hidden_layers={self.num_hidden_layers}."
            )
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size} and the target has {self.vocab_size} tokens "
                "(vocab_size); name some of them, or leave it out to draft among all."
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the target's {self.vocab_size} embedding rows; choose "
                "an unused special token of the target's tokenizer."
            )

    def _check_context(self):
        if self.context_fusion not in CONTEXT_FUSIONS:
            raise ValueError(f"context_fusion is {self.context_fusion!r}; this version serves {CONTEXT_FUSIONS}.")
        if self.context_kv_rope not in CONTEXT_KV_ROPES:
            raise ValueError(f"context_kv_rope is {self.context_kv_rope!r}; it must be one of {CONTEXT_KV_ROPES}.")
        needed = ("target_kv_layer_ids", "target_num_key_value_heads", "target_head_dim")
        if self.context_fusion not in READS_TARGET_KV:
            given = [name for name in needed if getattr(self, name) is not None]
            given += ["context_kv_rope"] if self.context_kv_rope != "kept" else []
            if given:
                raise ValueError(
                    f"{', '.join(given)} without effect: context_fusion={self.context_fusion!r} reads no keys and "
                    f"values; leave out {given[0]}, or set context_fusion to one of {READS_TARGET_KV}."
                )
            return
        missing = [name for name in needed if not getattr(self, name)]
        if missing:
            raise ValueError(
                f"context_fusion={self.context_fusion!r} needs {', '.join(missing)}; from_target(), and "
                "from_dflash() given the target, read them from the target."
            )
        ids = self.target_kv_layer_ids
        if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= (self.num_target_layers or ids[-1] + 1):
            raise ValueError(
                f"target_kv_layer_ids is {ids}; name layers of the target (num_target_layers="
                f"{self.num_target_layers}), counted from 0, strictly ascending."
            )
        if self.context_fusion == "kv":
            if self.target_layer_ids:
                raise ValueError(
                    f"target_layer_ids is {self.target_layer_ids}, and context_fusion='kv' reads no hidden states; "
                    "leave it out (target_kv_layer_ids names the layers), or use 'hybrid'."
                )
            self.target_layer_ids = []
        if self.context_kv_rope == "reapplied":
            if self.target_head_dim != self.head_dim:
                raise ValueError(
                    f"context_kv_rope='reapplied' takes the drafter's rotation off the target's keys, and head_dim is "
                    f"{self.head_dim} there and {self.target_head_dim} here; use 'kept'."
                )
            if self.rope_parameters.get("rope_type") in ("dynamic", "longrope"):
                raise ValueError(
                    f"context_kv_rope='reapplied' with rope_type {self.rope_parameters['rope_type']!r}, whose "
                    "frequencies change with the length of the text: which ones a key was rotated by is not known; "
                    "use 'kept'."
                )

    def _check_axes(self):
        if self.conditioning not in CONDITIONINGS:
            raise ValueError(f"conditioning is {self.conditioning!r}; it must be one of {CONDITIONINGS}.")
        if self.proposal not in PROPOSALS:
            raise ValueError(f"proposal is {self.proposal!r}; it must be one of {PROPOSALS}.")
        self._check_items()

    def _check_items(self):
        if self.item_slots < 0:
            raise ValueError(f"item_slots is {self.item_slots}; it is the tokens of an item, or 0 for none.")
        if not self.item_slots:
            for name in ("item_token_ranges", "item_separator_id"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} is {getattr(self, name)} and item_slots is 0; set item_slots to the tokens of an "
                        f"item, or leave out {name}."
                    )
            return
        ranges = self.item_token_ranges
        if ranges is None or len(ranges) != self.item_slots:
            raise ValueError(
                f"item_slots is {self.item_slots} and item_token_ranges {ranges}; give one range of token ids, "
                "[first, end), for each slot of an item."
            )
        for one in ranges:
            pair = isinstance(one, (list, tuple)) and len(one) == 2
            pair = pair and all(isinstance(end, Integral) and not isinstance(end, bool) for end in one)
            if not pair or not 0 <= one[0] < one[1] <= self.vocab_size:
                raise ValueError(
                    f"item_token_ranges has {one}; a range is [first, end), not empty, and within the target's "
                    f"{self.vocab_size} embedding rows."
                )
        self.item_token_ranges = ranges = [[int(first), int(end)] for first, end in ranges]
        by_first = sorted(ranges)
        for before, after in zip(by_first, by_first[1:]):
            if after[0] < before[1]:
                raise ValueError(
                    f"item_token_ranges {before} and {after} overlap; a token must say at which slot of an item it "
                    "stands, so give every slot ids of its own."
                )
        separator = self.item_separator_id
        if separator is not None and not 0 <= separator < self.vocab_size:
            raise ValueError(
                f"item_separator_id {separator} is outside the target's {self.vocab_size} embedding rows; name the "
                "token behind each item, or leave it out."
            )
        for name in ("item_separator_id", "mask_token_id"):
            token = getattr(self, name)
            if token is not None and any(first <= token < end for first, end in ranges):
                raise ValueError(
                    f"{name} {token} is within item_token_ranges, whose tokens belong to items; name another token, "
                    "or correct the ranges."
                )
        if separator is not None and separator == self.mask_token_id:
            raise ValueError(
                f"item_separator_id and mask_token_id are both {separator}; the mask token must never stand in the "
                "text, name another."
            )


def check_fields(names: Iterable[str]):
    """Raises a ValueError for a name that is no field of the config, which would keep it and never read it."""
    known = {*RetraceConfig.__dataclass_fields__, "attn_implementation", "rope_scaling", "rope_theta"}
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ValueError(
                f"RetraceConfig has no field {name!r}" + (f"; did you mean {near[0]!r}?" if near else ".")
            )


__all__ = ["RetraceConfig"]
