"""
The target plays both sides of a chat, so that there is text of its own where nobody has prompts.

An instruction-tuned target that is shown the start of a user's turn goes on as a user would. Its user turns are
sampled, its answers are greedy: on-policy text for a drafter, as varied as what the target was tuned on. All rows
start with the same tokens and go on turn after turn, so that a batch has neither padding nor idle rows.

Source of the sampled prompts: Magpie, arXiv 2406.08464.
"""

import hashlib
import inspect
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..few_rows import is_plain_linear
from ..recurrent_states import positions_behind
from ..roomy_cache import roomy_cache
from ..seeds import mixed_generator
from ..target_head import draft_logits, transform_logits
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
    def answers_next(self) -> bool:
        return not (self.forced or self.user)

    @property
    def asks_next(self) -> bool:
        return self.user and not self.forced

    @property
    def may_end(self) -> bool:
        return self.spoken > 0  # nothing follows from an empty turn

    def take(self, said: int | None = None) -> int:
        """The row's next token: the template's where it stands, else what the target said."""
        if self.forced:
            token = self.forced.pop(0)
        else:
            token = said
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
    """A step's heads that share K/V as queries of one head, and K and V read as they lie: a fifth of SDPA's time on a
    CPU in bfloat16. Rounded as transformers' eager attention rounds."""
    if query.shape[2] > 1 or attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    batch_size, heads, _, head_dim = query.shape
    scaling = kwargs.get("scaling")
    grouped = query.view(batch_size, key.shape[1], -1, head_dim) * (head_dim**-0.5 if scaling is None else scaling)
    scores = torch.matmul(key, grouped.transpose(2, 3)).transpose(2, 3)  # [b, K/V heads, queries of each, length]
    weights = scores.contiguous().softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights, value).reshape(batch_size, 1, heads, -1), None


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
    head = _Head(target)
    unsaid = torch.tensor([i for i in tokenizer.all_special_ids if i != parts.end], dtype=torch.long, device=device)
    ids = torch.tensor([[chat.take() for _ in parts.start] for chat in chats], device=device)
    while len(chats[0].ids) < length:
        placed = positions_behind(target, ids, len(chats[0].ids) - ids.shape[1])
        states = target.get_decoder()(ids, cache=cache, use_cache=True, **placed).last_hidden_state[:, -1]
        answering = [i for i, chat in enumerate(chats) if chat.answers_next]
        asking = [i for i, chat in enumerate(chats) if chat.asks_next]
        states = states[answering + asking]
        rough = head.rough(states)
        greedy = head.greedy(states[: len(answering)], rough[: len(answering)])
        states, rough = states[len(answering) :], rough[len(answering) :]
        rough[:, unsaid] = -torch.inf
        rough[[not chats[i].may_end for i in asking], parts.end] = -torch.inf
        drawn = head.draw(states, rough, top_k, temperature, generator)
        said = dict(zip(answering + asking, greedy.tolist() + drawn.tolist()))
        ids = torch.tensor([[chat.take(said.get(i))] for i, chat in enumerate(chats)], device=device)
    return [{"input_ids": chat.ids, "answers": chat.answers} for chat in chats]


class _Head:
    """The target's next tokens by its logits in float32; in bfloat16 they would tie too often.

    Where the head is no more than weights in half precision, all tokens' logits are made in that, which is exact up to
    the rounding of the result, and the few that may be chosen once more in float32. Another head runs as it is.
    """

    def __init__(self, target):
        self.target, self.head = target, target.get_output_embeddings()
        dtype = getattr(self.head, "weight", torch.empty(0)).dtype if is_plain_linear(self.head) else None
        self.is_half = dtype in (torch.bfloat16, torch.float16)
        # Two units in the last place: one for the rounding, one for sums made in another order near its edge.
        self.margin = 2 * torch.finfo(dtype).eps if self.is_half else 0.0

    def rough(self, states: torch.Tensor) -> torch.Tensor:
        """`[n, D]` to `[n, V]`: logits in half precision and before scale and softcap, or the float32 ones."""
        if self.is_half:
            return self.head(states)
        return draft_logits(self.target, states).float()

    def greedy(self, states: torch.Tensor, rough: torch.Tensor, count: int = 16) -> torch.LongTensor:
        """The argmax of the float32 logits, `[n]`; of several the first."""
        places = _largest(rough, count).sort(dim=-1).values
        found = places.gather(1, self._float32(states, rough, places).argmax(dim=-1, keepdim=True))[:, 0]
        near = rough.gather(1, places).float()
        largest = near.amax(dim=-1)
        bound = largest - self.margin * largest.abs()
        # Where all of them are near the largest, so may others be.
        for row in (near.amin(dim=-1) >= bound).nonzero()[:, 0].tolist():
            places = (rough[row].float() >= bound[row]).nonzero().T  # [1, m]
            one = slice(row, row + 1)
            found[row] = places[0, self._float32(states[one], rough[one], places).argmax()]
        return found

    def draw(self, states, rough, top_k: int, temperature: float, generator: torch.Generator) -> torch.LongTensor:
        """A token of the `top_k` likeliest by its probability, `[n]`; -inf in `rough` leaves one out."""
        if not len(rough):
            return torch.empty(0, dtype=torch.long, device=rough.device)
        places = _largest(rough, top_k)
        logits = self._float32(states, rough, places) / temperature
        logits = logits.masked_fill(rough.gather(1, places) == -torch.inf, -torch.inf)
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        return places.gather(1, drawn)[:, 0]

    def _float32(self, states: torch.Tensor, rough: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The logits of some tokens, `[n, m]` for places `[n, m]`."""
        if not self.is_half:
            return rough.gather(1, places)
        logits = torch.bmm(self.head.weight[places].float(), states.float()[..., None])[..., 0]
        if self.head.bias is not None:
            logits = logits + self.head.bias[places].float()
        return transform_logits(self.target, logits)


def _largest(logits: torch.Tensor, count: int, size: int = 64) -> torch.LongTensor:
    """The places of the `count` largest of `[n, V]`, `[n, count]`; all where there are no more.

    They stand in the `count` groups of `size` whose largest is largest: on a CPU the maxima are a fifth of the work of
    a topk over all. A group is every so-manieth token, since maxima are then taken along rows as they lie.
    """
    rows, length = logits.shape
    count, groups = min(count, length), length // size
    largest = logits[:, : groups * size].unflatten(1, (size, groups)).amax(dim=1)
    chosen = largest.topk(min(count, groups), sorted=False).indices  # [n, c]
    places = (chosen[..., None] + groups * torch.arange(size, device=logits.device)).flatten(1)
    rest = torch.arange(groups * size, length, device=logits.device).expand(rows, -1)
    places = torch.cat([places, rest], dim=1)
    return places.gather(1, logits.gather(1, places).topk(count, sorted=False).indices)


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
