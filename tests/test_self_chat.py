"""The target chatting with itself: whose words stand where, and that answers are its greedy tokens."""

import pytest
import torch

from retrace_hf.data.responses import read_responses
from retrace_hf.data.self_chat import ChatTemplateParts, _grouped_attention, _Head, _largest, self_chat
from retrace_hf.data.tokenize import tokenize_responses
from retrace_hf.target_head import transform_logits
from retrace_hf.targets import load_target

from .fixtures import tiny_target
from .test_target_families import IntegerHead


LENGTH = 96


@pytest.fixture(scope="module")
def chats(smollm2, tmp_path_factory):
    target, tokenizer = smollm2
    folder = tmp_path_factory.mktemp("self_chat")
    options = {"batch_size": 3, "length": LENGTH, "max_user_tokens": 12, "max_answer_tokens": 16, "progress": False}
    counts = self_chat(target, tokenizer, folder, num_tokens=2 * 3 * LENGTH, **options)
    return folder, counts, options


def test_parts_put_together_are_the_template(smollm2):
    _, tokenizer = smollm2
    parts = ChatTemplateParts(tokenizer)
    words = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("Hi there", "Hello.", "Why?")]
    ids = parts.start + words[0] + parts.after_user + words[1] + parts.after_answer + words[2] + parts.after_user
    turns = [("user", "Hi there"), ("assistant", "Hello."), ("user", "Why?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def test_answers_are_the_targets_greedy_tokens_and_nothing_else_is_marked(smollm2, chats):
    target, tokenizer = smollm2
    folder, counts, options = chats
    files = sorted(folder.glob("*.jsonl.gz"))
    rows = [row for file in files for row in read_responses(file)]
    assert len(files) == 2 and len(rows) == 6 and counts["tokens"] == 6 * LENGTH
    assert len({tuple(row["input_ids"]) for row in rows}) == 6
    parts = ChatTemplateParts(tokenizer)
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            greedy = target(ids).logits[0].argmax(-1)
        assert row["answers"]
        for start, end in row["answers"]:
            assert 1 <= end - start <= 16
            assert torch.equal(greedy[start - 1 : end - 1], ids[0, start:end])
            assert row["input_ids"][start - len(parts.after_user) : start] == parts.after_user
    dataset = tokenize_responses(files, tokenizer)
    assert [sum(mask) for mask in dataset["loss_mask"]] == [sum(e - s for s, e in row["answers"]) for row in rows]
    assert counts["answer_tokens"] == sum(map(sum, dataset["loss_mask"]))


def test_resumes_shard_by_shard_and_keeps_settings_apart(smollm2, chats):
    target, tokenizer = smollm2
    folder, counts, options = chats
    first, second = sorted(folder.glob("*.jsonl.gz"))
    kept, before = first.stat().st_mtime_ns, list(read_responses(second))
    second.unlink()
    assert self_chat(target, tokenizer, folder, num_tokens=2 * 3 * LENGTH, **options) == counts
    assert first.stat().st_mtime_ns == kept and list(read_responses(second)) == before
    with pytest.raises(ValueError, match="other settings"):
        self_chat(target, tokenizer, folder, num_tokens=10, **{**options, "length": 64})
    assert target.config._attn_implementation == "sdpa"


def test_every_answer_is_marked(smollm2, chats):
    """What stands behind the template's start of an answer, up to the end of its turn, is an answer."""
    parts = ChatTemplateParts(smollm2[1])
    folder, _, _ = chats
    several = 0
    for row in (row for file in sorted(folder.glob("*.jsonl.gz")) for row in read_responses(file)):
        ids, size = row["input_ids"], len(parts.after_user)
        starts = [i + size for i in range(len(ids) - size) if ids[i : i + size] == parts.after_user]
        assert [start for start, _ in row["answers"]] == starts
        for start, end in row["answers"]:
            assert end == len(ids) or end - start == 16 or ids[end - 1] == parts.end
        several += len(starts) > 1
    assert several


@pytest.mark.parametrize("family, overrides", [("mistral", {"sliding_window": 24}), ("granite", {}), ("gemma2", {})])
def test_answers_are_greedy_whatever_the_target(smollm2, tmp_path, family, overrides):
    """Sliding layers, logit scales and softcaps."""
    tokenizer = smollm2[1]
    eos = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    target = tiny_target(family, vocab_size=len(tokenizer), **eos, **overrides)
    options = {"batch_size": 3, "length": 110, "max_user_tokens": 12, "max_answer_tokens": 16, "progress": False}
    self_chat(target, tokenizer, tmp_path, num_tokens=3 * 110, **options)
    checked = 0
    for row in read_responses(tmp_path / "self_chat_00000.jsonl.gz"):
        with torch.no_grad():
            greedy = target(torch.tensor([row["input_ids"]])).logits[0].argmax(-1).tolist()
        for start, end in row["answers"]:
            assert greedy[start - 1 : end - 1] == row["input_ids"][start:end]
            checked += end - start
    assert checked > 60


def test_seeds_share_no_shard_and_targets_no_folder(smollm2, tmp_path):
    target, tokenizer = smollm2
    options = {"batch_size": 1, "length": 48, "progress": False}
    for seed in (0, 1):
        self_chat(target, tokenizer, tmp_path / str(seed), num_tokens=2 * 48, seed=seed, **options)
    rows = {tuple(row["input_ids"]) for file in tmp_path.glob("*/*.jsonl.gz") for row in read_responses(file)}
    assert len(rows) == 4
    other = tiny_target("llama", vocab_size=len(tokenizer))
    with pytest.raises(ValueError, match="other settings"):
        self_chat(other, tokenizer, tmp_path / "0", num_tokens=3 * 48, **options)


def test_users_start_with_the_prompts_given(smollm2, tmp_path):
    """Dealt out over all chats in turn, shard by shard; a chat without one is the target's from the start."""
    target, tokenizer = smollm2
    prompts = ["What is 2 + 3?", "Name a colour.", "Say hello.", "Write a haiku.", "Why is the sky blue?"]
    options = {"batch_size": 2, "length": LENGTH, "max_user_tokens": 12, "max_answer_tokens": 8, "progress": False}
    self_chat(target, tokenizer, tmp_path, num_tokens=2 * 2 * LENGTH, prompts=prompts, **options)
    rows = [row for file in sorted(tmp_path.glob("*.jsonl.gz")) for row in read_responses(file)]
    parts = ChatTemplateParts(tokenizer)
    said = [[], [], [], []]
    for i, row in enumerate(rows):
        begin, ends = len(parts.start), [start - len(parts.after_user) for start, _ in row["answers"]]
        for (_, last), end in zip([(0, None), *row["answers"]], ends):
            if last is not None:  # the template ends an answer that was cut
                begin = last - (row["input_ids"][last - 1] == parts.end) + len(parts.after_answer)
            said[i].append(tokenizer.decode(row["input_ids"][begin:end]))
        with torch.no_grad():
            greedy = target(torch.tensor([row["input_ids"]])).logits[0].argmax(-1).tolist()
        assert all(greedy[s - 1 : e - 1] == row["input_ids"][s:e] for s, e in row["answers"])
    assert [turns[0] for turns in said] == prompts[:4]
    assert said[0][1] == prompts[4] and said[1][1] not in prompts
    for size, others in ((2, prompts[:4]), (3, prompts)):
        with pytest.raises(ValueError, match="other settings"):
            self_chat(target, tokenizer, tmp_path, num_tokens=size * 2 * LENGTH, prompts=others, **options)


def test_bad_arguments(smollm2, tmp_path, monkeypatch):
    target, tokenizer = smollm2
    with pytest.raises(ValueError, match="num_tokens"):
        self_chat(target, tokenizer, tmp_path / "a", num_tokens=0)
    with pytest.raises(ValueError, match="chat template alone"):
        self_chat(target, tokenizer, tmp_path / "b", num_tokens=10, length=10, batch_size=1)
    with pytest.raises(ValueError, match="8192 positions"):
        self_chat(target, tokenizer, tmp_path / "b", num_tokens=10, length=10_000, batch_size=1)
    with pytest.raises(ValueError, match=r"Unknown options \['warmth'\]"):
        self_chat(target, tokenizer, tmp_path / "b", num_tokens=10, warmth=1)
    bad = (([], "prompts is empty"), (["Hi", ""], "Prompt 1 has 0"), (["a b " * 99], "Prompt 0 has"))
    for prompts, message in bad:
        with pytest.raises(ValueError, match=message):
            self_chat(target, tokenizer, tmp_path / "b", num_tokens=10, length=128, prompts=prompts)
    assert not list(tmp_path.iterdir())  # nothing is claimed by a call that could not start
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="no chat template"):
        self_chat(target, tokenizer, tmp_path / "c", num_tokens=10)


def float32_logits(target, states):
    head = target.get_output_embeddings()
    bias = None if head.bias is None else head.bias.float()
    return transform_logits(target, torch.nn.functional.linear(states.float(), head.weight.float(), bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize("vocab_size", [200, 1000])
def test_the_greedy_token_is_the_float32_argmax(dtype, family, vocab_size):
    """Also where half precision ties, where many tokens are near the largest, and where rows are the same."""
    target = tiny_target(family, vocab_size=vocab_size).to(dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        weight = target.get_output_embeddings().weight
        weight.normal_()
        weight[vocab_size // 2 :] = weight[: vocab_size // 2] + torch.randn(vocab_size // 2, 32).to(dtype) / 300
        weight[40:80] = weight[:40]  # of two that are the same the first is said
        states = torch.randn(300, 32).to(dtype)
        states[::50] = 0.0  # all logits are the same
        head = _Head(target)
        rough, wanted = head.rough(states), float32_logits(target, states)
        found = head.greedy(states, rough)
    assert torch.equal(found, wanted.argmax(-1))
    assert torch.equal(head.greedy(states, rough, count=1), found)
    if dtype == torch.bfloat16:
        assert (rough.argmax(-1) != found).float().mean() > 0.05  # in that many half precision alone is wrong


def test_a_quantised_head_says_its_own_argmax():
    target = tiny_target("llama")
    target.lm_head = IntegerHead(target.lm_head)
    head, states = _Head(target), torch.randn(50, 32)
    rough = head.rough(states)
    assert torch.equal(head.greedy(states, rough), target.lm_head(states).argmax(-1))


@pytest.mark.parametrize("length", [20, 64, 200, 1000])
def test_the_largest_are_found_in_groups(length):
    torch.manual_seed(0)
    for logits in (torch.randn(30, length), torch.randint(0, 5, (30, length)).float()):
        for count in (1, 7, 64):
            places = _largest(logits, count)
            assert places.shape == (30, min(count, length))
            assert all(len(set(row)) == len(row) for row in places.tolist())
            found = logits.gather(1, places).sort(-1, descending=True).values
            assert torch.equal(found, logits.topk(min(count, length)).values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_users_words_are_drawn_from_the_likeliest(dtype):
    target = tiny_target("granite").to(dtype)
    head, state = _Head(target), torch.randn(1, 32).to(dtype)
    with torch.no_grad():
        logits = float32_logits(target, state)[0] / 0.01
        states, generator = state.expand(20_000, -1), torch.Generator().manual_seed(0)
        rough = head.rough(state)
        out = logits.topk(7).indices[1]
        rough[:, out] = -torch.inf
        drawn = head.draw(states, rough.expand(20_000, -1), 6, 0.01, generator)
    logits[out] = -torch.inf
    top = logits.topk(6)
    assert set(drawn.tolist()) <= set(top.indices.tolist())
    share = (drawn[:, None] == top.indices).float().mean(0)
    torch.testing.assert_close(share, top.values.softmax(-1), atol=0.02, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_attention_is_attention(dtype):
    query, key, value = (torch.randn(3, heads, length, 16).to(dtype) for heads, length in ((6, 1), (2, 30), (2, 30)))
    room = [torch.cat([states, states], dim=2)[:, :, :30] for states in (key, value)]  # as in a cache with room
    for scale in (None, 0.3):
        found, _ = _grouped_attention(None, query, *room, None, scaling=scale)
        whole = [states.float().repeat_interleave(3, dim=1) for states in (key, value)]
        wanted = torch.nn.functional.scaled_dot_product_attention(query.float(), *whole, scale=scale)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(found.float(), wanted.transpose(1, 2), atol=tolerance, rtol=tolerance)


def test_bfloat16_targets_chat_too(tmp_path):
    target, tokenizer = load_target("HuggingFaceTB/SmolLM2-135M-Instruct", dtype=torch.bfloat16)
    counts = self_chat(target, tokenizer, tmp_path, num_tokens=2 * 64, batch_size=2, length=64, progress=False)
    assert counts["rows"] == 2
