"""
The target plays both sides of a chat, so that there is text of its own where nobody has prompts.

An instruction-tuned target that is shown the start of a user's turn goes on as a user would. Its user turns are
sampled, its answers are greedy: on-policy text for a drafter, as varied as what the target was tuned on. All rows
start with the same tokens and go on turn after turn, so that a batch has neither padding nor idle rows.

Source of the sampled prompts: Magpie, arXiv 2406.08464.
"""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..candidate_generator import draft_logits, transform_logits
from ..few_rows import is_plain_linear
from ..recurrent_states import positions_behind
from ..roomy_cache import roomy_cache
from ..seeds import mixed_generator
from .features import target_fingerprint
from .responses import claim_folder, read_responses, write_responses


class ChatTemplateParts:
    """
    What a chat template writes around the turns, as tokens: `start` (up to the first user's words), `after_user` (up
    to the answer), `after_answer` (up to the next user's words), `end` (the token that ends a turn).

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the target's.

    Raises:
        `ValueError`: there is no chat template, it does not show the turns as they are, or it ends them without the
        eos token.
    """

    def __init__(self, tokenizer):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(f"The tokenizer {tokenizer.name_or_path!r} has no chat template; self-chat needs one.")
        user, answer, again = "Zyxw", "Vuts", "Rqpo"
        turns = [{"role": "user", "content": user}]
        first = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": again}]
        second = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        if any(text.count(part) != 1 for text, part in ((first, user), (second, answer), (second, again))):
            raise ValueError("The chat template changes or drops what the turns say; self-chat cannot use it.")
        before, after = first.split(user)
        between = second[second.index(answer) + len(answer) : second.index(again)]
        self.end = tokenizer.eos_token_id
        self.start, self.after_user, self.after_answer = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, after, between)
        )
        if self.end is None or self.after_user[:1] != [self.end] or self.after_answer[:1] != [self.end]:
            raise ValueError(
                f"The chat template does not end turns with the eos token {tokenizer.eos_token!r}; self-chat cannot "
                "tell where a turn ends."
            )


class _Chat:
    """One row: its tokens so far, where the answers are, and whose turn it is."""

    def __init__(self, parts: ChatTemplateParts, max_user_tokens: int, max_answer_tokens: int, words=()):
        self.parts, self.limits = parts, {True: max_user_tokens, False: max_answer_tokens}
        self.ids, self.answers, self.words = [], [], iter(words)
        self.forced = list(parts.start)
        self._let_user_speak()

    def _let_user_speak(self):
        """With the words given, while there are any; the target speaks for the user after them."""
        words = next(self.words, None)
        self.user, self.spoken = words is None, 0
        if words is not None:
            self.forced += [*words, *self.parts.after_user]

    @property
    def may_end(self) -> bool:
        return self.spoken > 0  # nothing follows from an empty turn

    def take(self, sampled: int, greedy: int) -> int:
        """The row's next token, given what the target would say as the user and as itself."""
        if self.forced:
            token = self.forced.pop(0)
        else:
            token = sampled if self.user else greedy
            if not self.user:
                self._mark_answer()
            self.spoken += 1
            if token == self.parts.end or self.spoken == self.limits[self.user]:
                self._end_turn(by_itself=token == self.parts.end)
        self.ids.append(token)
        return token

    def _mark_answer(self):
        place = len(self.ids)
        if self.spoken:
            self.answers[-1][1] = place + 1
        else:
            self.answers.append([place, place + 1])

    def _end_turn(self, by_itself: bool):
        # A turn that was cut is ended for it; that end is not the target's word and is not marked.
        after = self.parts.after_user if self.user else self.parts.after_answer
        self.forced = list(after[1:] if by_itself else after)
        if self.user:
            self.user, self.spoken = False, 0
        else:
            self._let_user_speak()


def _grouped_attention(module, query, key, value, attention_mask, **kwargs):
    """A step's heads that share K/V as queries of one head: a quarter of SDPA's time on a CPU in bfloat16."""
    if query.shape[2] > 1 or attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    batch_size, heads, _, head_dim = query.shape
    grouped = query.view(batch_size, key.shape[1], -1, head_dim)
    out = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, scale=kwargs.get("scaling"))
    return out.reshape(batch_size, 1, heads, -1), None


AttentionInterface.register("retrace_grouped", _grouped_attention)
# Without masks of its own an attention gets none, and sliding layers would see everything.
AttentionMaskInterface.register("retrace_grouped", sdpa_mask)


@torch.no_grad()
def chat_rows(
    target,
    tokenizer,
    num_rows: int,
    length: int,
    generator: torch.Generator,
    prompts: Sequence[Sequence[list[int]]] | None = None,
    max_user_tokens: int = 96,
    max_answer_tokens: int = 224,
    temperature: float = 0.8,
    top_k: int = 50,
) -> list[dict]:
    """
    Chats of the target with itself, one batch.

    Args:
        target (`PreTrainedModel`): an instruction-tuned decoder-only model.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer, see [`ChatTemplateParts`].
        num_rows (`int`): chats, generated at once.
        length (`int`): tokens of each.
        generator (`torch.Generator`): on the target's device; draws the user's words.
        prompts (sequence of sequences of `list[int]`, *optional*): each chat's first user turns, as tokens; the target
            speaks for the user after them.
        max_user_tokens, max_answer_tokens (`int`, *optional*, default to 96 and 224): where a turn is cut.
        temperature (`float`, *optional*, defaults to 0.8), top_k (`int`, *optional*, defaults to 50): of the user's
            words. The answers are greedy.

    Returns:
        `list[dict]`: `input_ids` (`length` tokens) and `answers` (pairs of start and end of the greedy tokens).
    """
    parts = ChatTemplateParts(tokenizer)
    prompts = [()] * num_rows if prompts is None else prompts
    chats = [_Chat(parts, max_user_tokens, max_answer_tokens, words) for words in prompts]
    device = target.get_input_embeddings().weight.device
    config = target.config.get_text_config(decoder=True)
    cache = roomy_cache(config, length)
    logits_of = _float32_head(target)
    unsaid = torch.tensor([i for i in tokenizer.all_special_ids if i != parts.end], dtype=torch.long, device=device)
    ids = torch.tensor([[chat.take(-1, -1) for _ in parts.start] for chat in chats], device=device)
    while len(chats[0].ids) < length:
        placed = positions_behind(target, ids, len(chats[0].ids) - ids.shape[1])
        states = target.get_decoder()(ids, cache=cache, use_cache=True, **placed).last_hidden_state[:, -1]
        logits = logits_of(states)
        greedy = logits.argmax(-1).tolist()
        logits[:, unsaid] = -torch.inf
        logits[[not chat.may_end for chat in chats], parts.end] = -torch.inf
        top = (logits / temperature).topk(min(top_k, logits.shape[-1]))
        drawn = torch.multinomial(top.values.softmax(-1), 1, generator=generator)
        sampled = top.indices.gather(1, drawn).squeeze(1).tolist()
        ids = torch.tensor([[c.take(s, g)] for c, s, g in zip(chats, sampled, greedy)], device=device)
    return [{"input_ids": chat.ids, "answers": chat.answers} for chat in chats]


def _float32_head(target) -> Callable[[torch.Tensor], torch.Tensor]:
    """The target's logits in float32, in bfloat16 they would tie too often; as its head gives them where that is more
    than its weights."""
    head = target.get_output_embeddings()
    if not is_plain_linear(head):
        return lambda states: draft_logits(target, states).float()
    weight = head.weight.float()
    bias = None if head.bias is None else head.bias.float()
    return lambda states: transform_logits(target, torch.nn.functional.linear(states.float(), weight, bias))


def self_chat(
    target,
    tokenizer,
    path: str | Path,
    num_tokens: int,
    batch_size: int = 128,
    length: int = 320,
    seed: int = 0,
    prompts: Sequence[str] | None = None,
    progress: bool = True,
    **options,
) -> dict[str, int]:
    """
    Chats of the target with itself, into shards `self_chat_00000.jsonl.gz`, ... of a folder, one a batch. A shard is
    written whole or not at all; called again with the same arguments it goes on with the first shard that is missing.

    Args:
        target (`PreTrainedModel`): an instruction-tuned decoder-only model.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer.
        path (`str` or `Path`): the folder; made if missing.
        num_tokens (`int`): tokens wanted in all, rounded up to whole batches.
        batch_size (`int`, *optional*, defaults to 128), length (`int`, *optional*, defaults to 320): chats of a
            batch, and tokens of each.
        seed (`int`, *optional*, defaults to 0): every shard has its own stream.
        prompts (sequence of `str`, *optional*): what users say first, dealt out over all chats in turn; a chat that
            has answered its own goes on with words that the target gives the user.
        progress (`bool`, *optional*, defaults to `True`): show a bar.
        options: those of [`chat_rows`].

    Returns:
        `dict[str, int]`: `rows`, `tokens` and `answer_tokens` over all shards.

    Raises:
        `ValueError`: a size below 1, a chat template that will not do, or a folder made with other settings.
    """
    for name, size in (("num_tokens", num_tokens), ("batch_size", batch_size), ("length", length)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")
    parts = ChatTemplateParts(tokenizer)
    template = len(parts.start)
    if length <= template:
        raise ValueError(f"length is {length}; the chat template alone has {template} tokens.")
    positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise ValueError(f"length is {length}; the target has {positions} positions.")
    unknown = set(options) - set(inspect.signature(chat_rows).parameters)
    if unknown:
        raise ValueError(f"Unknown options {sorted(unknown)}; those of chat_rows are taken.")
    words = None if prompts is None else _user_turns(tokenizer, prompts, length - template - len(parts.after_user))
    path = Path(path)
    shards = -(-num_tokens // (batch_size * length))
    settings = {"batch_size": batch_size, "length": length, "seed": seed, "target": target_fingerprint(target)}
    if prompts is not None:
        # Dealt out over all shards, so their number is part of what each holds.
        settings |= {"prompts": hashlib.sha256("\0".join(prompts).encode()).hexdigest(), "shards": shards}
    claim_folder(path, {**settings, **options})
    device = target.get_input_embeddings().weight.device
    implementation, was_training = target.config._attn_implementation, target.training
    counts = {"rows": 0, "tokens": 0, "answer_tokens": 0}
    target.eval()
    if implementation == "sdpa":
        target.set_attn_implementation("retrace_grouped")
    try:
        for shard in tqdm(range(shards), desc="self-chat", disable=not progress):
            file = path / f"self_chat_{shard:05d}.jsonl.gz"
            if not file.is_file():
                generator = mixed_generator(seed, shard, device=device)
                chats = range(shard * batch_size, (shard + 1) * batch_size)
                own = None if words is None else [words[i :: shards * batch_size] for i in chats]
                rows = chat_rows(target, tokenizer, batch_size, length, generator, own, **options)
                named = ({"id": f"self-{seed}-{shard}-{i}", "source": "self-chat", **r} for i, r in enumerate(rows))
                write_responses(named, file)
            for row in read_responses(file):
                counts["rows"] += 1
                counts["tokens"] += len(row["input_ids"])
                counts["answer_tokens"] += sum(end - start for start, end in row["answers"])
    finally:
        if implementation == "sdpa":
            target.set_attn_implementation(implementation)
        target.train(was_training)
    return counts


def _user_turns(tokenizer, prompts: Sequence[str], room: int) -> list[list[int]]:
    """The prompts as tokens. Raises where one is empty or leaves none of `room` for an answer, and where there are
    none."""
    if not prompts:
        raise ValueError("prompts is empty; leave it out where the target is to speak for the user from the start.")
    turns = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
    for i, words in enumerate(turns):
        if not 0 < len(words) < room:
            raise ValueError(
                f"Prompt {i} has {len(words)} tokens; it must have some, and leave room for an answer within length."
            )
    return turns
