"""Arguments of [`RetraceTrainer`]."""

import copy
from dataclasses import dataclass, field

from transformers import TrainingArguments


@dataclass
class RetraceTrainingArguments(TrainingArguments):
    r"""
    Arguments of [`RetraceTrainer`]; those of [`~transformers.TrainingArguments`] with other defaults where the papers
    give them (learning_rate 6e-4, cosine, warm-up 0.04, clip 1.0: DFlash, arXiv 2602.06036). Tokens seen are counted
    and logged (`include_num_input_tokens_seen="non_padding"`), since that is what learning curves are drawn over.

    > Parameters that control the rollout

    Args:
        num_anchors (`int`, *optional*, defaults to 512):
            Anchors N drawn anew for each sequence and step.
        num_carried_rounds (`int`, *optional*, defaults to 1):
            Rounds drafted behind the fresh one, each from where the text accepted the last. 0 trains plain DFlash;
            with `conditioning="none"` on the drafter it gives the SFT control (same blocks, no signal).
        beta_warmup_steps (`int`, *optional*, defaults to 50):
            Steps over which beta rises from 0 to 1 (ReTrace).

    > Parameters that control the loss

        loss_type (`str`, *optional*, defaults to `"decay"`):
            `"decay"`: exp(-(k - 1) / gamma), normalised by the sum of weights (DFlash). `"dpace"`: detached prefix
            confidence (arXiv 2605.18810), normalised by the number of blocks.
        loss_gamma (`float`, *optional*):
            gamma of the decay, in slots; 7, 5, 4 for B = 16, 10, 8 by default.
        loss_gamma_growth (`float`, *optional*, defaults to 0):
            What gamma grows by with each epoch, so that later slots count for more once the first ones are learnt
            (DFlare, arXiv 2606.02091: from 4.5 by 1 at B = 16). Evaluation keeps the first epoch's.
        dpace_alpha (`float`, *optional*, defaults to 0.5):
            alpha of D-PACE.
        soft_share (`float`, *optional*, defaults to 0):
            Share s of soft targets in each slot's loss, (1 - s) CE(label) + s KL(target || drafter). The target's
            last states come from the cached features (`with_last=True`) or from a pass over the text.
        soft_tokens (`int`, *optional*, defaults to 32):
            How many of the target's likeliest tokens soft targets name. Of the others the sum of their mass counts.
        loss_chunk_size (`int`, *optional*, defaults to 1024):
            Rows whose logits over the vocabulary exist at once.
        loss_on_seen_tokens (`bool`, *optional*, defaults to `False`):
            Run the loss's softmax over the tokens that occur in the answers only. Cheaper by their share of the
            vocabulary, which pays on a CPU; train on without it afterwards, so that the other tokens are kept down.
            Needs `num_carried_rounds=0`: carried rounds must propose as `generate()` does.

    > Parameters that control the optimizer

        trajectory_learning_rate (`float`, *optional*):
            Learning rate of the trajectory modules, which start from nothing; `learning_rate` by default.
        muon (`bool`, *optional*, defaults to `False`):
            Train the matrices with Muon ([`torch.optim.Muon`], updates scaled as AdamW's, so `learning_rate` keeps its
            meaning) and the norms with AdamW, instead of `optim`. Needs whole matrices: no FSDP, no ZeRO-3.

    > Parameters that control the evaluation

        eval_max_prompts (`int`, *optional*, defaults to 64):
            Of [`RetraceTrainer`]'s `eval_prompts`, how many are drafted at each evaluation: the first of every kind,
            then the second of every kind, and so on.
        eval_max_new_tokens (`int`, *optional*, defaults to 128):
            Tokens of each of these answers at most; 2 or more, since the first is never drafted.
    """

    learning_rate: float = field(default=6e-4, metadata={"help": "Initial learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule of the learning rate."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Warm-up: steps, or a share of them when < 1."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "The collator needs columns no forward names."}
    )
    include_num_input_tokens_seen: str = field(
        default="non_padding", metadata={"help": "Tokens of text that are counted and logged: all, non_padding or no."}
    )
    num_anchors: int = field(default=512, metadata={"help": "Anchors drawn for each sequence and step."})
    num_carried_rounds: int = field(
        default=1, metadata={"help": "Rounds drafted behind the fresh one; 0: plain DFlash."}
    )
    beta_warmup_steps: int = field(default=50, metadata={"help": "Steps over which beta rises from 0 to 1."})
    loss_type: str = field(default="decay", metadata={"help": "decay or dpace.", "choices": ["decay", "dpace"]})
    loss_gamma: float | None = field(default=None, metadata={"help": "Decay of the slot weights, in slots."})
    loss_gamma_growth: float = field(default=0.0, metadata={"help": "What gamma grows by with each epoch."})
    dpace_alpha: float = field(default=0.5, metadata={"help": "alpha of D-PACE."})
    soft_share: float = field(default=0.0, metadata={"help": "Share of KL(target || drafter) in each slot's loss."})
    soft_tokens: int = field(default=32, metadata={"help": "Tokens that soft targets name."})
    loss_chunk_size: int = field(default=1024, metadata={"help": "Rows whose logits exist at once."})
    loss_on_seen_tokens: bool = field(
        default=False, metadata={"help": "Softmax over the tokens that occur in the answers only."}
    )
    trajectory_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the trajectory modules; learning_rate by default."}
    )

    muon: bool = field(default=False, metadata={"help": "Muon for the matrices, AdamW for the norms."})
    eval_max_prompts: int = field(default=64, metadata={"help": "Prompts drafted at each evaluation."})
    eval_max_new_tokens: int = field(default=128, metadata={"help": "Tokens of each of these answers at most."})

    def __post_init__(self):
        super().__post_init__()
        if self.loss_type not in ("decay", "dpace"):
            raise ValueError(f"loss_type is {self.loss_type!r}; it must be 'decay' or 'dpace'.")
        if self.loss_gamma_growth and self.loss_type != "decay":
            raise ValueError(
                f"loss_gamma_growth is {self.loss_gamma_growth}; it has no effect with loss_type={self.loss_type!r}, "
                "leave it out."
            )
        if self.loss_gamma_growth < 0:
            raise ValueError(f"loss_gamma_growth is {self.loss_gamma_growth}; it must be at least 0.")
        for name in ("label_smoothing_factor", "neftune_noise_alpha", "use_liger_kernel"):
            if getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)}; it has no effect on a drafter, leave it out.")
        if not 0 <= self.soft_share <= 1:
            raise ValueError(f"soft_share is {self.soft_share}; it must be from 0 to 1.")
        if self.loss_on_seen_tokens and self.num_carried_rounds:
            raise ValueError(
                f"loss_on_seen_tokens goes with num_carried_rounds=0, not {self.num_carried_rounds}: carried rounds "
                "must propose over the whole vocabulary."
            )
        for name, least in (
            ("num_anchors", 1),
            ("num_carried_rounds", 0),
            ("beta_warmup_steps", 0),
            ("soft_tokens", 1),
            ("loss_chunk_size", 1),
            ("eval_max_prompts", 1),
            ("eval_max_new_tokens", 2),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}.")

    def __getstate__(self) -> dict:
        # training_args.bin is pickled from this, and goes to the Hub with the folder.
        return {**self.__dict__, "hub_token": None}

    def __deepcopy__(self, memo: dict):
        # A copy in this process (callbacks make some) still pushes.
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return new
