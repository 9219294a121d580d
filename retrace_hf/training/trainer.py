"""[`RetraceTrainer`]: one step is clean text, drafted blocks, and as many carried rounds as asked for."""

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from ..candidate_generator import check_pairing
from ..card import as_hub_id, write_card
from ..context import context_size, gate_mean
from ..data import RetraceDataCollator
from ..draft_vocabulary import DraftVocabulary
from ..files import write_text
from ..hub import CARD, is_own, plain_hub_errors, read_card, read_hub_card, write_code
from ..initialization import check_kv_reading
from ..seeds import mixed_generator
from ..target_head import draft_logits
from .arguments import RetraceTrainingArguments
from .checkpoints import is_whole, last_whole_checkpoint
from .eval_prompts import draft_prompts, first_of_each_kind, read_eval_rows
from .losses import SoftTargets, chunked_loss, decay_weights, default_gamma, dpace_weights, soft_targets
from .optimizer import is_mixture, muon_with_adamw
from .recurrent_verification import has_recurrent_layers
from .rollout import (
    Blocks,
    block_labels,
    carried_trajectory,
    check_verification,
    count_accepted,
    draft_blocks,
    read_clean_text,
    sample_anchors,
    scored_places,
    shift_blocks,
    verify_blocks,
)
from .sharding import check_fsdp, check_not_sharded, shard_target


logger = logging.get_logger(__name__)

_BLOCKS = "num_blocks_seen"  # fresh blocks drafted in training, as logged

# What Trainer offers for models that return logits; here it would do nothing, and say nothing.
_WITHOUT_LOGITS = {
    "compute_loss_func": "the loss is set by loss_type and soft_share",
    "compute_metrics": "there are no predictions to compute them from; loss and tau are among the metrics already",
    "preprocess_logits_for_metrics": "there are no logits to process",
}


class RetraceTrainer(Trainer):
    r"""
    Trains a drafter against its frozen target, on text that the target wrote.

    Args:
        model ([`RetraceDrafter`]): The drafter; or `model_init`, which makes one.
        target (`PreTrainedModel`): The target, which is frozen and stays outside the checkpoints.
        args ([`RetraceTrainingArguments`], *optional*): Arguments.
        data_collator ([`RetraceDataCollator`], *optional*):
            Gives `input_ids`, `loss_mask` and, where features were computed before, `context_hidden_states`.
        eval_prompts (iterable of `dict`, *optional*):
            Held-out prompts: rows with `prompt` (text), `messages` or `prompt_ids`, and `source`, their kind. Every
            evaluation drafts them greedily with `generate()` and logs `eval_tau` and, by kind, `eval_tau_{source}`:
            `metric_for_best_model="eval_tau"` keeps the best checkpoint and stops early. An `eval_dataset` is then
            not needed. How many and how long: `eval_max_prompts`, `eval_max_new_tokens`.
        kwargs: As in [`~transformers.Trainer`].

    A drafter in half precision is trained in float32; `bf16=True` computes in bfloat16 on float32 weights. Evaluation
    leaves the drafter and the random numbers as it found them. `train(resume_from_checkpoint=True)` goes on from the
    last checkpoint that is whole.

    Raises:
        ValueError: drafter and target do not belong together, the target cannot verify blocks in training, a dataset
            has nothing to learn, or an option would be without effect.

    Source: training of ReTrace, arXiv 2608.29748; stage 1 (`num_carried_rounds=0`) is DFlash's, arXiv 2602.06036.
    """

    def __init__(
        self,
        model=None,
        target: PreTrainedModel | None = None,
        args: RetraceTrainingArguments | None = None,
        data_collator: Callable | None = None,
        eval_prompts: Iterable[dict] | None = None,
        **kwargs,
    ):
        args = args if args is not None else RetraceTrainingArguments()
        for option, reason in _WITHOUT_LOGITS.items():
            if kwargs.get(option) is not None:
                raise ValueError(f"{option} has no effect in RetraceTrainer: {reason}. Leave it out.")
        if target is None:
            raise ValueError("target is missing; pass the model that the drafter is to draft for.")
        check_not_sharded(target)
        self.target = target
        if model is not None:
            _check_drafter(model, target, args.device)
        self._eval_prompts = []
        if eval_prompts is not None:
            prompts = read_eval_rows(eval_prompts, kwargs.get("processing_class"))
            self._eval_prompts = first_of_each_kind(prompts, args.eval_max_prompts)
            if kwargs.get("eval_dataset") is None:
                kwargs["eval_dataset"] = {}  # no set of rows; the prompts are evaluated alone
        if data_collator is None:
            data_collator = RetraceDataCollator()
        target.requires_grad_(False).eval()
        # By whether they come from training or evaluation; accepted + 1 and blocks by round.
        self._sums = {True: defaultdict(float), False: defaultdict(float)}
        super().__init__(model=model, args=args, data_collator=data_collator, **kwargs)
        if isinstance(self.data_collator, RetraceDataCollator):
            if self.data_collator.vocab_size is None:
                rows = target.get_input_embeddings().weight.shape[0]  # whole: it is sharded below
                self.data_collator = replace(self.data_collator, vocab_size=rows)
            _check_rows(self.train_dataset, "train_dataset")
            _check_rows(self.eval_dataset, "eval_dataset")
        check_fsdp(getattr(self.accelerator.state, "fsdp_plugin", None))
        if self._eval_prompts and self._is_sharded:
            raise ValueError(
                "eval_prompts is set and the models are sharded over processes (FSDP, ZeRO-3), where generate() "
                "cannot draft; leave eval_prompts out, and measure checkpoints with examples/evaluate_drafters.py."
            )
        # The loss comes out normalised over the whole accumulated batch.
        self.loss_is_scaled_for_ga = True
        self.model_accepts_loss_kwargs = True
        if self._is_zero3:
            if self._verifies(self._config) and has_recurrent_layers(target):
                # Each pass of a sharded target waits for all processes, and they need other numbers of them.
                raise ValueError(
                    f"{type(target).__name__} keeps a recurrent state, so what is drafted for it cannot be verified "
                    "while it is sharded over processes (ZeRO-3); use DDP or ZeRO-2, or conditioning='gated'."
                )
            shard_target(self.target, self.args)
        elif self.target.device != self.args.device and not hasattr(self.target, "hf_device_map"):
            self.target.to(self.args.device)
        if self._verifies(self._config):
            check_verification(self.target)
        if args.loss_on_seen_tokens and self._config.draft_vocab_size is not None:
            raise ValueError(
                "loss_on_seen_tokens is set and the drafter has a draft vocabulary "
                f"(draft_vocab_size={self._config.draft_vocab_size}), over which the loss then is; leave it out."
            )
        self._loss_vocabulary = self._make_loss_vocabulary()

    # -- anchors: drawn before the step, so that the loss can be normalised over the accumulated batch ---------------

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """As upstream, and draws each sequence's anchors from (seed, step, place in the global batch)."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        total, gamma = torch.zeros((), device=device), self._gamma(training=True)
        size, accumulated = self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps
        for i, batch in enumerate(batches):
            # The processes take batches in turn, so this is a row's place whatever their number.
            turn = (self.state.global_step * accumulated + i) * self.args.world_size + self.args.process_index
            blocks = self._draw_anchors(batch["loss_mask"], first=turn * size)
            batch["anchors"], batch["anchors_valid"] = blocks
            total += self._count_items(batch, blocks, gamma).to(device)
        if self.args.world_size > 1:
            total = self.accelerator.gather(total).sum()
        return batches, total

    def _draw_anchors(self, loss_mask: torch.Tensor, first: int) -> Blocks:
        generators = [mixed_generator(self.args.seed, first + i) for i in range(loss_mask.shape[0])]
        return sample_anchors(loss_mask, self.args.num_anchors, generators)

    def _count_items(self, batch: dict, blocks: Blocks, gamma: float) -> torch.Tensor:
        """What the loss is divided by: sum of slot weights (decay) or blocks (D-PACE) of the fresh round."""
        if self.args.loss_type == "dpace":
            return blocks.valid.sum().float()
        _, supervised = self._labels(batch["input_ids"], batch["loss_mask"], blocks)
        return decay_weights(supervised, gamma).sum()

    def _verifies(self, config) -> bool:
        """Whether steps read the target's states on drafted blocks."""
        return config.conditioning == "corrected" and self.args.num_carried_rounds > 0

    @property
    def _unwrapped(self):
        return self.accelerator.unwrap_model(self.model)

    @property
    def _config(self):
        return self._unwrapped.config

    def _gamma(self, training: bool) -> float:
        """gamma of the decay, which may grow with the epochs in training; evaluations stay comparable."""
        gamma = self.args.loss_gamma or default_gamma(self._config.block_size)
        return gamma + (self.args.loss_gamma_growth * int(self.state.epoch or 0) if training else 0.0)

    # -- the step ----------------------------------------------------------------------------------------------------

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Loss of the fresh round and of every carried one, each weighted alike."""
        blocks = self._blocks_of(inputs)
        if num_items_in_batch is None:
            num_items_in_batch = self._count_items(inputs, blocks, self._gamma(self.model.training))
        self._set_beta()
        with self.accelerator.autocast():
            losses = self._roll_out(model, inputs, blocks)
        if not self.model.training:
            self._add("loss", sum(losses) / len(losses), num_items_in_batch)
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
        self._check_width(features)
        teacher = None if last is None else self._teach(last, loss_mask)

        losses, trajectory = [], None
        embedding = self.target.get_input_embeddings()
        for carried in range(self.args.num_carried_rounds + 1):
            states = draft_blocks(model, embedding, input_ids, features, blocks, trajectory)
            self._record_gate()
            labels, supervised = self._labels(input_ids, loss_mask, blocks)
            loss, drafted = self._block_loss(states, labels, supervised, blocks, teacher)
            losses.append(loss)
            accepted = count_accepted(drafted, labels, supervised)
            self._record(carried, accepted, blocks)
            if carried == self.args.num_carried_rounds:
                break
            if config.conditioning != "none":
                verified = states  # overwrite and gated never read the target's states
                if verifies:
                    with self._as_generate_runs_it():
                        verified = verify_blocks(self.target, cache, input_ids, drafted, blocks, accepted + 1)
                trajectory = carried_trajectory(states, verified, accepted)
            blocks = shift_blocks(blocks, accepted, loss_mask)
        return losses

    @property
    def _vocabulary(self) -> DraftVocabulary | None:
        """The tokens that head, loss and proposals run over; `None`: all."""
        if self._loss_vocabulary is not None:
            return self._loss_vocabulary
        return DraftVocabulary.of(self._unwrapped, self.target)

    def _labels(self, input_ids, loss_mask, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels of slots 1..B-1, and which are supervised (`[b, N, B - 1]`). One that is not among the drafted
        tokens cannot be accepted: neither its slot nor those behind it are supervised."""
        labels, supervised = block_labels(input_ids, loss_mask, blocks, self._config.block_size)
        if self._vocabulary is not None:
            known = self._vocabulary.places(labels)[1]
            supervised = supervised & known.cumprod(dim=-1).bool()
        return labels, supervised

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
            config = self._config
            clean = read_clean_text(
                self.target, inputs["input_ids"], config.target_layer_ids, room, config.target_kv_layer_ids
            )
            return clean.features, clean.last if soft else None, clean.cache
        return features, last if soft else None, None

    def _check_width(self, features: torch.Tensor):
        config = self._config
        width = context_size(config)
        if features.shape[-1] != width:
            kv = f" and target_kv_layer_ids={config.target_kv_layer_ids}" if config.target_kv_layer_ids else ""
            raise ValueError(
                f"The features have {features.shape[-1]} values a token and the drafter reads {width}, of "
                f"target_layer_ids={config.target_layer_ids}{kv}; build them for these (TargetFeatures.build_or_open)."
            )

    def _teach(self, last: torch.Tensor, loss_mask: torch.Tensor) -> SoftTargets:
        """What the target held likeliest behind each token of the text, `[b, S, k]`: once a token, however many slots
        are drafted there. Tokens behind which no answer token stands have none."""
        scores = torch.zeros_like(loss_mask)
        scores[:, :-1] = loss_mask[:, 1:]
        found = soft_targets(last[scores], self._logits, self.args.soft_tokens, self.args.loss_chunk_size)
        whole = (part.new_zeros(*scores.shape, part.shape[-1]) for part in found)
        return SoftTargets(*(out.index_put_((scores,), part) for out, part in zip(whole, found)))

    def _block_loss(self, states, labels, supervised, blocks, teacher=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted sum of losses over the slots of valid blocks, and the drafted tokens `[b, N, B - 1]`."""
        valid = blocks.valid
        if teacher is not None:
            places = scored_places(blocks, states.shape[2], teacher.tokens.shape[1])[valid].flatten()
            of_block = torch.arange(len(valid), device=valid.device)[:, None].expand_as(valid)[valid]
            of_slot = of_block.repeat_interleave(states.shape[2] - 1)
            teacher = SoftTargets(*(part[of_slot, places] for part in teacher))
        rows = states[:, :, 1:][valid]  # [n, B - 1, D]
        row_labels, supervised = labels[valid], supervised[valid]
        vocabulary = self._vocabulary
        if vocabulary is not None:
            row_labels = vocabulary.places(row_labels)[0]
        loss, cross_entropy, predictions = chunked_loss(
            rows.flatten(0, 1),
            row_labels.flatten(),
            self._logits,
            self.args.loss_chunk_size,
            teacher,
            self.args.soft_share,
        )
        if self.args.loss_type == "dpace":
            weights = dpace_weights(cross_entropy.view(row_labels.shape), supervised, self.args.dpace_alpha)
        else:
            weights = decay_weights(supervised, self._gamma(self.model.training))
        if vocabulary is not None:
            predictions = vocabulary.token_ids.to(predictions.device)[predictions]
        drafted = torch.zeros_like(labels)
        drafted[valid] = predictions.view(row_labels.shape)
        # The empty sum keeps every parameter in the graph of a rank without anchors.
        return (weights * loss.view(row_labels.shape)).sum() + 0.0 * states.sum(), drafted

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        with self._as_generate_runs_it():
            vocabulary = self._vocabulary
            return draft_logits(self.target, rows) if vocabulary is None else vocabulary.logits(rows)

    def _make_loss_vocabulary(self) -> DraftVocabulary | None:
        """The tokens that the loss runs over where no proposal comes of it, so that it may be in half precision."""
        if self.args.num_carried_rounds:
            return None
        dtype = torch.bfloat16 if self.args.bf16 else None
        if self._config.draft_vocab_size is not None:
            return DraftVocabulary(self.target, self._unwrapped.draft_token_ids, dtype)
        if not self.args.loss_on_seen_tokens:
            return None
        seen = set()
        for row in self.train_dataset:
            seen.update(t for t, answer in zip(row["input_ids"], row["loss_mask"]) if answer)
        return DraftVocabulary(self.target, torch.tensor(sorted(seen)), dtype)

    def _set_beta(self):
        if not self.model.training:  # in evaluation the module takes it as 1
            return
        warmup = self.args.beta_warmup_steps
        beta = min(1.0, self.state.global_step / warmup) if warmup else 1.0
        for module in self._unwrapped.modules():
            if "beta" in vars(module):  # PEFT's modules_to_save has a copy of the fusion beside it
                module.beta = beta

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

    def get_decay_parameter_names(self, model) -> list[str]:
        """As upstream, without DFlare's mixture weights, which decay would draw to the mean of the taps."""
        return [name for name in super().get_decay_parameter_names(model) if not is_mixture(name)]

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None

    def _record(self, carried: int, accepted: torch.Tensor, blocks: Blocks):
        """Acceptance by round on known text."""
        name = "tau_fresh" if carried == 0 else f"tau_carried_{carried}"
        self._add(name, ((accepted + 1) * blocks.valid).sum(), blocks.valid.sum())

    def _record_gate(self):
        """How open a hybrid drafter's gates were in its last forward: near 0 the target's K/V are not used."""
        mean = gate_mean(self._unwrapped)
        if mean is not None:
            self._add("gate_mean", mean, torch.ones_like(mean))

    def _add(self, name: str, value: torch.Tensor, count: torch.Tensor):
        """Adds to a mean that is kept on the device and read only when logged."""
        sums = self._sums[self.model.training]
        sums[name] = sums[name] + torch.stack([value.detach().float(), count.float()])

    def _means(self, training: bool) -> dict[str, tuple[float, float]]:
        """Means over all processes since they were last asked for, and of how many; those of nothing are left out."""
        means, sums = {}, self._sums[training]
        for name in sorted(sums):
            value, count = self.accelerator.reduce(sums[name], reduction="sum").tolist()
            if count > 0:
                means[name] = (value / count, count)
        sums.clear()
        return means

    def log(self, logs: dict, *args, **kwargs):
        if "loss" in logs:
            means = self._means(training=True)
            logs |= {name: round(mean, 4) for name, (mean, _) in means.items() if name != "loss"}
            if "tau_fresh" in means:
                # Read from the log, which a run that goes on brings with it.
                before = next((e[_BLOCKS] for e in reversed(self.state.log_history) if _BLOCKS in e), 0)
                logs[_BLOCKS] = before + int(means["tau_fresh"][1])
        super().log(logs, *args, **kwargs)

    def _track_num_input_tokens(self, inputs):
        # Upstream counts the model's main input, which is made from these in the step.
        super()._track_num_input_tokens({**inputs, self._unwrapped.main_input_name: inputs["input_ids"]})

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval"):
        """As upstream; with `eval_prompts` the metrics hold `eval_tau`, and `eval_tau_{source}` by kind."""
        datasets = self.eval_dataset if eval_dataset is None else eval_dataset
        if not (self._eval_prompts and isinstance(datasets, dict)):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        # Several sets, or none: the prompts are drafted once, not with each of them.
        prompts, self._eval_prompts = self._eval_prompts, []
        try:
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._eval_prompts = prompts
        with self._undisturbed():
            tau = self._draft_eval_prompts(metric_key_prefix)
        metrics.update(tau)
        self.log(dict(tau))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def evaluation_loop(self, dataloader, description: str, *args, metric_key_prefix: str = "eval", **kwargs):
        """As upstream, with the acceptance on the evaluation's own blocks among the metrics, and the loss a mean over
        all of its slots, whatever the size of a batch."""
        self._sums[False].clear()
        with self._undisturbed():
            output = super().evaluation_loop(
                dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs
            )
            if not self._sums[False]:
                raise ValueError(
                    f"The {description.lower()} set gave no batch: it is empty, or dataloader_drop_last is set "
                    f"and it has fewer rows than per_device_eval_batch_size={self.args.per_device_eval_batch_size}."
                )
            means = {name: mean for name, (mean, _) in self._means(training=False).items()}
            if "loss" not in means:
                raise ValueError(
                    f"No row of the {description.lower()} set has two answer tokens in a row (column 'loss_mask'), so "
                    "there is nothing to measure on it; give rows of `retrace-hf prepare`."
                )
            for name, mean in means.items():
                output.metrics[f"{metric_key_prefix}_{name}"] = mean if name == "loss" else round(mean, 4)
            if self._eval_prompts and description == "Evaluation":
                output.metrics.update(self._draft_eval_prompts(metric_key_prefix))
        return output

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Puts back the drafter's mode and torch's random numbers: a run with evaluations equals one without."""
        was_training = self.model.training
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            yield
        self.model.train(was_training)

    def _draft_eval_prompts(self, prefix: str) -> dict[str, float]:
        """tau over the prompts, which the processes share; over all of them and by kind."""
        kinds = sorted({prompt.kind for prompt in self._eval_prompts} - {None})
        mine = self._eval_prompts[self.args.process_index :: self.args.world_size]
        with self._as_it_is_saved() as drafter:
            stats = draft_prompts(self.target, drafter, mine, self.args.eval_max_new_tokens)
        found = {kind: torch.tensor([s.new_tokens - s.calls, s.rounds]) for kind, s in stats.items()}
        nothing = torch.zeros(2, dtype=torch.long)
        counts = torch.stack([sum(found.values(), nothing), *(found.get(kind, nothing) for kind in kinds)])
        counts = self.accelerator.reduce(counts.to(self.args.device), reduction="sum").tolist()
        names = ["tau", *(f"tau_{kind}" for kind in kinds)]
        return {
            f"{prefix}_{name}": round(tokens / rounds, 4) for name, (tokens, rounds) in zip(names, counts) if rounds
        }

    @contextmanager
    def _as_it_is_saved(self) -> Iterator[nn.Module]:
        """The drafter as a user will load it: in evaluation, without the autocast that mixed precision puts round its
        forward."""
        drafter = self._unwrapped
        was_training, prepared = drafter.training, vars(drafter).get("forward")
        if "_original_forward" in vars(drafter):  # left there by accelerate
            drafter.forward = drafter._original_forward
        drafter.eval()
        try:
            yield drafter
        finally:
            if "_original_forward" in vars(drafter):
                drafter.forward = prepared
            drafter.train(was_training)

    @property
    def _is_sharded(self) -> bool:
        return self.is_fsdp_enabled or self._is_zero3

    @property
    def _is_zero3(self) -> bool:
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        return plugin is not None and plugin.zero_stage == 3

    # -- going on, checkpoints, the Hub ------------------------------------------------------------------------------

    def call_model_init(self, trial=None):
        drafter = super().call_model_init(trial)
        _check_drafter(drafter, self.target, self.args.device)
        return drafter

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """As upstream; `resume_from_checkpoint=True` passes over a checkpoint that a kill cut short."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"resume_from_checkpoint is True and {self.args.output_dir} holds no whole checkpoint; leave it "
                    "out to start anew."
                )
        if not self.is_deepspeed_enabled:  # which holds the weights itself from its first step on
            _use_float32(self.model)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _run_epoch(self, *args, **kwargs):
        # Upstream looks at the limit only behind a step, so a run that is resumed at its end would train one more.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _save_checkpoint(self, model, trial):
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        if self.args.should_save:
            # The state is written last and says that the rest is whole; an older run's must not say it for this one.
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            if is_whole(folder):
                raise  # it was the upload that failed, or the removal of older ones
            shutil.rmtree(folder, ignore_errors=True)
            raise OSError(
                f"{folder} could not be written ({error}); what there was of it is removed. Mend that (is the disk "
                f"full?), then go on from {last_whole_checkpoint(folder.parent) or 'the start'}."
            ) from error

    def _push_from_checkpoint(self, checkpoint_folder: str):
        # Upstream copies weights and config, which name the code as theirs.
        if self.is_world_process_zero():
            write_code(self.args.output_dir)
        super()._push_from_checkpoint(checkpoint_folder)

    def init_hf_repo(self, *args, **kwargs):
        with plain_hub_errors(self.args.hub_model_id or Path(self.args.output_dir).absolute().name):
            super().init_hf_repo(*args, **kwargs)

    def push_to_hub(self, *args, **kwargs):
        """As upstream: weights, config, code, tokenizer, notes and card of `output_dir`."""
        with plain_hub_errors(self.args.hub_model_id or Path(self.args.output_dir).absolute().name):
            return super().push_to_hub(*args, **kwargs)

    def create_model_card(
        self, language=None, license=None, tags=None, model_name=None, finetuned_from=None, tasks=None, **kwargs
    ):
        """Renders the card of `output_dir` from its files (see `card.py`), unless somebody wrote one there himself.
        Arguments as upstream; `finetuned_from` is the target's Hub id, `dataset` those of the data."""
        folder = Path(self.args.output_dir)
        if not self.is_world_process_zero() or is_own(read_card(folder)):
            return
        hub_card = read_hub_card(self.hub_model_id, self.args.hub_token)
        if is_own(hub_card):
            write_text(folder / CARD, hub_card)
            return
        if not (folder / "config.json").is_file():  # a LoRA
            return super().create_model_card(language, license, tags, model_name, finetuned_from, tasks, **kwargs)
        datasets, tags = kwargs.get("dataset"), [tags] if isinstance(tags, str) else tags
        write_card(
            folder,
            overwrite=True,
            base_model=finetuned_from or as_hub_id(self.target.name_or_path),
            license=license,
            datasets=[datasets] if isinstance(datasets, str) else datasets,
            repo_id=self.hub_model_id,
            tags=tags,
        )

    def _set_signature_columns_if_needed(self):
        # remove_unused_columns goes by these; the drafter's forward names none of a row's columns.
        if self._signature_columns is None:
            self._signature_columns = ["input_ids", "attention_mask", "loss_mask", "row", "id"]


def _check_drafter(drafter: nn.Module, target: PreTrainedModel, device: torch.device):
    """Raises where this drafter cannot be trained for this target, or not here; and upcasts it."""
    check_pairing(drafter, target)
    check_kv_reading(drafter, target)
    _check_attention(drafter, device)
    _use_float32(drafter)


def _use_float32(drafter: nn.Module):
    """Upcasts a drafter whose trainable weights are in half precision."""
    half = {p.dtype for p in drafter.parameters() if p.requires_grad} & {torch.bfloat16, torch.float16}
    if half:
        logger.warning(
            f"The drafter's weights are {', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in half))} and "
            "are trained in float32, since most updates are smaller than half precision can add. Set bf16=True to "
            "compute in bfloat16; drafter.to(torch.bfloat16).save_pretrained(...) saves in it."
        )
        drafter.float()


def _check_attention(drafter: nn.Module, device: torch.device):
    implementation = drafter.config._attn_implementation
    cure = "load the drafter with attn_implementation='sdpa'."
    if "flash" in implementation:
        raise ValueError(f"attn_implementation={implementation!r} takes no mask of many blocks; {cure}")
    if implementation == "flex_attention" and device.type == "cpu":
        raise ValueError(f"attn_implementation='flex_attention' has no gradients on a CPU; {cure}")


def _check_rows(dataset, name: str):
    """Raises unless some row of a dataset (or of each, where there are several) has an anchor. Reads up to the first
    that has one."""
    if isinstance(dataset, dict):
        for key, one in dataset.items():
            _check_rows(one, f"{name}[{key!r}]")
        return
    if dataset is None or not hasattr(dataset, "__len__"):
        return  # a stream is looked at as it comes
    if not len(dataset):
        raise ValueError(f"{name} is empty; give rows of `retrace-hf prepare`.")
    RetraceDataCollator.check_columns(dataset[0], name)
    for number in range(len(dataset)):
        mask = dataset[number]["loss_mask"]
        if any(a and b for a, b in zip(mask, mask[1:])):
            return
    raise ValueError(
        f"No row of {name} has two answer tokens in a row (column 'loss_mask'), so there is nothing to learn from it; "
        "make the rows with `retrace-hf prepare`, and look whether max_length cuts the answers away."
    )


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
