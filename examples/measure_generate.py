"""Measures what `generate()` does with a drafter beyond one greedy answer, on a real target:

    python examples/measure_generate.py --drafter model_cards/retrace-smollm2-135m --output runs/generate.json

- turns: a second turn on the warm cache of the first against the same text from a cold start: tau, rounds, and whether
  the text is plain's.
- policies: tau at temperature 1 when proposals are each slot's argmax, and when they are drawn from the drafter.
- memory: many rounds on one prompt; what is alive beyond the two caches, early and late.
- context: milliseconds of the drafter's part of a round against the length of the text, with the whole context and
  with a window.

`--only turns policies` runs a part of it.
"""

import argparse
import gc
import statistics
import time
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache, set_seed
from transformers.generation.streamers import BaseStreamer

from retrace_hf import AcceptanceStats, RetraceCandidateGenerator, RetraceDrafter, record_acceptance
from retrace_hf.data.prompts import read_eval_prompts, render_prompt
from retrace_hf.evaluation import bootstrap_ratio, write_results
from retrace_hf.evaluation.results import bootstrap_interval, file_hash, provenance
from retrace_hf.measure import timed
from retrace_hf.targets import load_target
from retrace_hf.terminal import run_command


PARTS = ("turns", "policies", "memory", "context")


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--target", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", default="model_cards/retrace-smollm2-135m")
    parser.add_argument("--prompts", default=str(Path(__file__).parent / "data" / "eval_prompts.jsonl"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--limit", type=int, default=20, help="prompts of turns and policies")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1000, help="rounds of memory")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--window", type=int, default=256, help="context window that context is also measured with")
    parser.add_argument("--output", default="runs/generate.json")
    return parser.parse_args()


def spread(rows: list, count: int) -> list:
    """`count` of them, evenly over the list."""
    return rows[:: max(1, len(rows) // count)][:count]


def entry(stats: list[AcceptanceStats]) -> dict:
    total = AcceptanceStats.pooled(stats)
    return {
        "acceptance_length": total.acceptance_length,
        "acceptance_length_interval": bootstrap_interval(stats),
        "rounds": total.rounds,
        "new_tokens": total.new_tokens,
    }


def chat_ids(tokenizer, messages: list[dict]) -> torch.LongTensor:
    return torch.tensor([render_prompt(tokenizer, messages)])


# -- turns -----------------------------------------------------------------------------------------------------------


def measure_turns(args, target, tokenizer, drafter) -> dict:
    """Second turns of the prompts that have one. The text so far is the first turn's, token for token, as a chat
    program keeps it."""
    rows = [row for row in read_eval_prompts(args.prompts) if len(row["turns"]) > 1]
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    found: dict[str, list] = {"first": [], "warm": [], "cold": []}
    equal, prompts = 0, 0
    for row in tqdm(spread(rows, args.limit), desc="turns"):
        prompt = chat_ids(tokenizer, [{"role": "user", "content": row["turns"][0]}])
        cache = DynamicCache(config=target.config)
        with record_acceptance() as first:
            text = target.generate(prompt, assistant_model=drafter, cache=cache, **options)
        text = torch.cat([text, next_turn(tokenizer, text[0].tolist(), row["turns"][1])], dim=1)
        with record_acceptance() as warm:
            ours = target.generate(text, assistant_model=drafter, cache=cache, **options)
        with record_acceptance() as cold:
            target.generate(text, assistant_model=drafter, **options)
        for name, stats in (("first", first), ("warm", warm), ("cold", cold)):
            found[name].append(stats)
        equal += torch.equal(ours, target.generate(text, **options))
        prompts += 1
    return {
        **{name: entry(stats) for name, stats in found.items()},
        "warm_over_cold": bootstrap_ratio(found["warm"], found["cold"]),
        "prompts": prompts,
        "equal_to_plain": equal,
    }


def next_turn(tokenizer, so_far: list[int], question: str) -> torch.LongTensor:
    """What the chat template puts behind an answer to ask the next question, `[1, n]`."""
    marker = "RETRACE"
    messages = [{"role": "user", "content": marker}, {"role": "assistant", "content": marker}]
    whole = tokenizer.apply_chat_template(
        [*messages, {"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    tail = whole[whole.rindex(marker, 0, whole.rindex(question)) + len(marker) :]
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    # An answer that was not cut short ends with the token that the tail begins with.
    return torch.tensor([ids[1:] if so_far[-1] == ids[0] else ids])


# -- policies --------------------------------------------------------------------------------------------------------


def measure_policies(args, target, tokenizer, drafter) -> dict:
    found: dict[str, list] = {"argmax": [], "sample": []}
    own = drafter.config.proposal
    rows = spread(read_eval_prompts(args.prompts), args.limit)
    for number, row in enumerate(tqdm(rows, desc="policies")):
        prompt = chat_ids(tokenizer, [{"role": "user", "content": row["turns"][0]}])
        for policy, stats in found.items():
            drafter.config.proposal = policy
            set_seed(number)
            with record_acceptance() as recorded:
                target.generate(
                    prompt,
                    assistant_model=drafter,
                    max_new_tokens=args.max_new_tokens,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                )
            stats.append(recorded)
    drafter.config.proposal = own
    return {
        **{name: entry(stats) for name, stats in found.items()},
        "argmax_over_sample": bootstrap_ratio(found["argmax"], found["sample"]),
        "prompts": len(rows),
    }


# -- memory ----------------------------------------------------------------------------------------------------------


class Census(BaseStreamer):
    """Once every `every` rounds: tensors alive, their megabytes beyond the two caches, and the process's size."""

    def __init__(self, every: int, cache: DynamicCache):
        self.every, self.cache, self.calls, self.counts = every, cache, 0, []

    def put(self, value):
        self.calls += 1
        if self.calls % self.every == 0:
            self.counts.append(self.count())

    def end(self):
        pass

    def count(self) -> dict:
        gc.collect()
        # By type, not isinstance: asking some lazy modules for their class warns.
        tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        kept = getattr(self.cache, "_retrace_draft_context", None)  # none before the first block
        caches = [self.cache] + ([kept.cache] if kept else [])
        held = [states for cache in caches for layer in cache.layers for states in (layer.keys, layer.values)]
        cached = sum(states.untyped_storage().nbytes() for states in held)
        return {
            "tensors": len(tensors),
            "caches_mb": cached / 1e6,
            "other_mb": (sum(storages.values()) - cached) / 1e6,
            "resident_mb": resident_megabytes(),
        }


def resident_megabytes() -> float | None:
    """This process in memory, where the system says so."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), None)


def measure_memory(args, target, tokenizer, drafter) -> dict:
    """One long answer, end tokens forbidden."""
    prompt = chat_ids(tokenizer, [{"role": "user", "content": "Tell me a very long story about the sea."}])
    cache = DynamicCache(config=target.config)
    census = Census(max(1, args.rounds // 10), cache)
    ends = target.generation_config.eos_token_id
    with record_acceptance() as stats:
        target.generate(
            prompt,
            assistant_model=drafter,
            cache=cache,
            streamer=census,
            do_sample=True,
            temperature=1.5,
            suppress_tokens=ends if isinstance(ends, list) else [ends],
            max_new_tokens=target.config.max_position_embeddings - prompt.shape[1],
            stopping_criteria=[lambda ids, scores, **kwargs: stats.rounds >= args.rounds],
        )
    return {
        "rounds": stats.rounds,
        "new_tokens": stats.new_tokens,
        "first": census.counts[0],
        "last": census.counts[-1],
    }


# -- context ---------------------------------------------------------------------------------------------------------


def measure_context(args, target, tokenizer, drafter) -> dict:
    """Median milliseconds of `get_candidates` over the rounds behind a text of each length. The first round, which
    reads the whole prompt, is told apart."""
    words = torch.tensor([tokenizer("The sea was calm and the ship went on. " * 600)["input_ids"]])
    windowed = RetraceDrafter(
        type(drafter.config).from_dict({**drafter.config.to_dict(), "context_window": args.window})
    )
    windowed.load_state_dict(drafter.state_dict())
    rows = []
    for length in tqdm(args.lengths, desc="context"):
        row = {"length": length}
        for name, one in (("whole", drafter), ("window", windowed.eval())):
            log: list[tuple[float, float]] = []
            cache = DynamicCache(config=target.config)
            with timed(RetraceCandidateGenerator, "get_candidates", log), record_acceptance() as stats:
                started = time.perf_counter()
                target.generate(
                    words[:, :length], assistant_model=one, cache=cache, max_new_tokens=48, min_new_tokens=48,
                    do_sample=False,
                )  # fmt: skip
                seconds = time.perf_counter() - started
            drafts = [1000 * (end - start) for start, end in log]
            row[name] = {
                "draft_ms": statistics.median(drafts[2:]),
                "first_draft_ms": drafts[1],
                "round_ms": 1000 * seconds / stats.rounds,
                "cache_rows": cache._retrace_draft_context.cache.get_seq_length(),
            }
        rows.append(row)
    return {"rows": rows, "window": args.window}


def main():
    args = parse_args()
    target, tokenizer = load_target(args.target)
    drafter = RetraceDrafter.from_pretrained(args.drafter).eval()
    measures = {
        "turns": measure_turns,
        "policies": measure_policies,
        "memory": measure_memory,
        "context": measure_context,
    }
    weights = Path(args.drafter, "model.safetensors")
    weights = file_hash(weights) if weights.is_file() else args.drafter
    source = provenance([args.prompts], weights=weights, threads=torch.get_num_threads())
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    results = {}
    for part in args.only:
        results[part] = measures[part](args, target, tokenizer, drafter)
        print(part, results[part], flush=True)
        write_results(args.output, {**results, "provenance": source})


if __name__ == "__main__":
    run_command(main, "measure_generate")
