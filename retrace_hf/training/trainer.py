"""[`RetraceTrainer`]: one step is clean text, drafted blocks, and as many carried rounds as asked for."""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer

from ..candidate_generator import check_pairing, draft_logits, transform_logits
from ..data import RetraceDataCollator
from ..seeds import mixed_generator
from .arguments import RetraceTrainingArguments
from .losses import SeenTokens, chunked_loss, decay_weights, default_gamma, dpace_weights
from .optimizer import muon_with_adamw
from .rollout import (
    Blocks,
    block_labels,
    carried_trajectory,
    check_verification,
    count_accepted,
    draft_blocks,
    read_clean_text,
    sample_anchors,
    scoring_states,
    shift_blocks,
    verify_blocks,
)


class RetraceTrainer(Trainer):
    r"""
    Trains a drafter against its frozen target, on text that the target wrote.

    Args:
        model ([`RetraceDrafter`]): The drafter.
        target (`PreTrainedModel`): The target, which is frozen and stays outside the checkpoints.
        args ([`RetraceTrainingArguments`], *optional*): Arguments.
        data_collator ([`RetraceDataCollator`], *optional*):
            Gives `input_ids`, `loss_mask` and, where features were computed before, `context_hidden_states`.
        kwargs: As in [`~transformers.Trainer`].

    Raises:
        ValueError: drafter and target do not belong together, or the target cannot verify blocks in training.

    Source: training of ReTrace, arXiv 2608.29748; stage 1 (`num_carried_rounds=0`) is DFlash's, arXiv 2602.06036.
    """

    def __init__(
        self,
        model,
        target: PreTrainedModel,
        args: RetraceTrainingArguments | None = None,
        data_collator: Callable | None = None,
        **kwargs,
    ):
        args = args if args is not None else RetraceTrainingArguments()
        check_pairing(model, target)
        if data_collator is None:
            data_collator = RetraceDataCollator(pad_token_id=model.config.pad_token_id or 0)
        self.target = target.requires_grad_(False).eval()
        # By whether they come from training or evaluation; accepted + 1 and blocks by round.
        self._sums = {True: defaultdict(float), False: defaultdict(float)}
        super().__init__(model=model, args=args, data_collator=data_collator, **kwargs)
        # The loss comes out normalised over the whole accumulated batch.
        self.loss_is_scaled_for_ga = True
        self.model_accepts_loss_kwargs = True
        if self.target.device != self.args.device and not hasattr(self.target, "hf_device_map"):
            self.target.to(self.args.device)
        if self._verifies(self._config):
            check_verification(self.target)
        self._seen = self._seen_tokens() if args.loss_on_seen_tokens else None

    # -- anchors: drawn before the step, so that the loss can be normalised over the accumulated batch ---------------

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """As upstream, and draws each sequence's anchors from (seed, step, place in the global batch)."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        total = torch.zeros((), device=device)
        per_process = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        start = (self.state.global_step * self.args.world_size + self.args.process_index) * per_process
        for i, batch in enumerate(batches):
            first = start + i * self.args.per_device_train_batch_size
            blocks = self._draw_anchors(batch["loss_mask"], first)
            batch["anchors"], batch["anchors_valid"] = blocks
            total += self._count_items(batch, blocks).to(device)
        if self.args.world_size > 1:
            total = self.accelerator.gather(total).sum()
        return batches, total

    def _draw_anchors(self, loss_mask: torch.Tensor, first: int) -> Blocks:
        generators = [mixed_generator(self.args.seed, first + i) for i in range(loss_mask.shape[0])]
        return sample_anchors(loss_mask, self.args.num_anchors, generators)

    def _count_items(self, batch: dict, blocks: Blocks) -> torch.Tensor:
        """What the loss is divided by: sum of slot weights (decay) or blocks (D-PACE) of the fresh round."""
        block_size = self._config.block_size
        _, supervised = block_labels(batch["input_ids"], batch["loss_mask"], blocks, block_size)
        if self.args.loss_type == "dpace":
            return blocks.valid.sum().float()
        return decay_weights(supervised, self._gamma).sum()

    def _verifies(self, config) -> bool:
        """Whether steps read the target's states on drafted blocks."""
        return config.conditioning == "corrected" and self.args.num_carried_rounds > 0

    @property
    def _config(self):
        return self.accelerator.unwrap_model(self.model).config

    @property
    def _gamma(self) -> float:
        return self.args.loss_gamma or default_gamma(self._config.block_size)

    # -- the step ----------------------------------------------------------------------------------------------------

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Loss of the fresh round and of every carried one, each weighted alike."""
        blocks = self._blocks_of(inputs)
        if num_items_in_batch is None:
            num_items_in_batch = self._count_items(inputs, blocks)
        self._set_beta()
        with self.accelerator.autocast():
            losses = self._roll_out(model, inputs, blocks)
        loss = sum(losses) / (len(losses) * num_items_in_batch.clamp(min=1e-6))
        if self.args.world_size > 1 and self.model.training:
            loss = loss * self.args.world_size  # gradients are averaged over processes, the count is global
        return (loss, {}) if return_outputs else loss

    def _blocks_of(self, inputs: dict) -> Blocks:
        if "anchors" in inputs:
            return Blocks(inputs["anchors"], inputs["anchors_valid"])
        # Evaluation draws the same anchors every time.
        return self._draw_anchors(inputs["loss_mask"], first=0)

    def _roll_out(self, model, inputs: dict, blocks: Blocks) -> list[torch.Tensor]:
        """Sums of weighted cross entropy, one a round: draft, compare, verify, shift, draft again."""
        input_ids, loss_mask = inputs["input_ids"], inputs["loss_mask"]
        config = self._config
        # Only the correction reads the target's states on the drafts; all else does without verification.
        verifies = self._verifies(config)
        with self._as_generate_runs_it():
            room = blocks.anchors.shape[1] * config.block_size if verifies else None
            features, last, cache = self._read_text(inputs, room)

        losses, trajectory = [], None
        embedding = self.target.get_input_embeddings()
        for carried in range(self.args.num_carried_rounds + 1):
            states = draft_blocks(model, embedding, input_ids, features, blocks, trajectory)
            labels, supervised = block_labels(input_ids, loss_mask, blocks, config.block_size)
            teacher = None if last is None else scoring_states(last, blocks, config.block_size)
            loss, drafted = self._block_loss(states, labels, supervised, blocks.valid, teacher)
            losses.append(loss)
            accepted = count_accepted(drafted, labels, supervised)
            self._record(carried, accepted, blocks)
            if carried == self.args.num_carried_rounds:
                break
            if config.conditioning != "none":
                verified = states  # overwrite and gated never read the target's states
                if verifies:
                    with self._as_generate_runs_it():
                        verified = verify_blocks(self.target, cache, input_ids, drafted, blocks)
                trajectory = carried_trajectory(states, verified, accepted)
            blocks = shift_blocks(blocks, accepted, loss_mask)
        return losses

    def _as_generate_runs_it(self):
        """The frozen target and its head in their own dtype, whatever precision the drafter trains in: features and
        proposals from under autocast are not those of generate()."""
        return torch.autocast(self.args.device.type, enabled=False)

    def _read_text(self, inputs: dict, room: int | None):
        """Features, the target's last states where the loss needs them, and its K/V where there must be `room` for
        drafted tokens behind them."""
        soft = self.args.soft_share > 0
        features, last = inputs.get("context_hidden_states"), inputs.get("target_last_states")
        if room is not None or features is None or (soft and last is None):
            clean = read_clean_text(self.target, inputs["input_ids"], self._config.target_layer_ids, room)
            return clean.features, clean.last if soft else None, clean.cache
        return features, last if soft else None, None

    def _block_loss(self, states, labels, supervised, valid, teacher=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted sum of losses over the slots of valid blocks, and the drafted tokens `[b, N, B - 1]`."""
        rows = states[:, :, 1:][valid]  # [n, B - 1, D]
        row_labels, supervised = labels[valid], supervised[valid]
        if self._seen is not None:
            row_labels, known = self._seen.places(row_labels)
            supervised = supervised & known.cumprod(dim=-1).bool()
        loss, cross_entropy, predictions = chunked_loss(
            rows.flatten(0, 1),
            row_labels.flatten(),
            self._logits,
            self.args.loss_chunk_size,
            None if teacher is None else teacher[valid].flatten(0, 1),
            self.args.soft_share,
        )
        if self.args.loss_type == "dpace":
            weights = dpace_weights(cross_entropy.view(row_labels.shape), supervised, self.args.dpace_alpha)
        else:
            weights = decay_weights(supervised, self._gamma)
        if self._seen is not None:
            predictions = self._seen.token_ids[predictions]
        drafted = torch.zeros_like(labels)
        drafted[valid] = predictions.view(row_labels.shape)
        # The empty sum keeps every parameter in the graph of a rank without anchors.
        return (weights * loss.view(row_labels.shape)).sum() + 0.0 * states.sum(), drafted

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        with self._as_generate_runs_it():
            if self._seen is not None:
                return transform_logits(self.target, self._seen.logits(rows))
            return draft_logits(self.target, rows)

    def _seen_tokens(self) -> SeenTokens:
        """Reads the training set once: every token that is an answer's."""
        seen = set()
        for row in self.train_dataset:
            seen.update(t for t, answer in zip(row["input_ids"], row["loss_mask"]) if answer)
        return SeenTokens(self.target.get_output_embeddings(), seen)

    def _set_beta(self):
        fusion = self.accelerator.unwrap_model(self.model).trajectory
        if fusion is not None:
            warmup = self.args.beta_warmup_steps
            fusion.beta = min(1.0, self.state.global_step / warmup) if warmup and self.model.training else 1.0

    # -- optimizer, evaluation, logs ---------------------------------------------------------------------------------

    def create_optimizer(self, model=None):
        if self.args.muon and self.optimizer is None:
            module = self.model if model is None else model
            decayed = set(self.get_decay_parameter_names(module))
            self.optimizer = muon_with_adamw(module, decayed, self.args)
        optimizer = super().create_optimizer(model)
        rate = self.args.trajectory_learning_rate
        if rate is not None and not any(group.get("trajectory") for group in optimizer.param_groups):
            _split_trajectory_group(optimizer, self.model, rate)
        return optimizer

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None

    def _record(self, carried: int, accepted: torch.Tensor, blocks: Blocks):
        """Acceptance by round on training text, summed on the device and read only when logged."""
        name = "fresh" if carried == 0 else f"carried_{carried}"
        sums = self._sums[self.model.training]
        sums[name] = sums[name] + torch.stack([((accepted + 1) * blocks.valid).sum(), blocks.valid.sum()]).detach()

    def log(self, logs: dict, *args, **kwargs):
        if "loss" in logs:
            logs |= self._tau(training=True)
        super().log(logs, *args, **kwargs)

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        """As upstream, with the acceptance on the evaluation's own blocks among the metrics."""
        self._sums[False].clear()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        output.metrics.update({f"{metric_key_prefix}_{k}": v for k, v in self._tau(training=False).items()})
        return output

    def _tau(self, training: bool) -> dict[str, float]:
        """tau by round over all processes since it was last asked for."""
        tau, sums = {}, self._sums[training]
        for name in sorted(sums):
            yielded, blocks = self.accelerator.reduce(sums[name].float(), reduction="sum").tolist()
            tau[f"tau_{name}"] = round(yielded / max(blocks, 1.0), 4)
        sums.clear()
        return tau


def _split_trajectory_group(optimizer: torch.optim.Optimizer, model: nn.Module, rate: float):
    """Moves the trajectory's parameters into groups of their own with another learning rate."""
    chosen = {id(p) for name, p in model.named_parameters() if "trajectory." in name}
    for group in list(optimizer.param_groups):
        moved = [p for p in group["params"] if id(p) in chosen]
        if not moved:
            continue
        group["params"] = [p for p in group["params"] if id(p) not in chosen]
        options = {k: v for k, v in group.items() if k not in ("params", "lr")}
        optimizer.add_param_group({"params": moved, "lr": rate, "trajectory": True, **options})
