"""
The demo: one target, one drafter, three prompts, three ways to the same text.

(a) plain `generate`; (b) transformers' own DFlash generator on the drafter's weights, which knows no trajectory and is
therefore called "signal off"; (c) ReTrace.
"""

from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .conversion import local_folder
from .measure import Run, answer, pool
from .modeling_retrace import RetraceDrafter
from .streamers import OriginStreamer
from .targets import load_target


DRAFTER = "model_cards/retrace-smollm2-135m"
PROMPTS = {
    "chat": "Explain to a new neighbour how a public library works, and why it is worth a visit.",
    "maths": (
        "A baker makes 24 rolls an hour and sells each for 3 dollars. She bakes for 5 hours and gives 20 rolls away. "
        "How much does she earn? Think step by step and give the final answer at the end."
    ),
    "code": "Write a Python function that counts how often each word occurs in a text, with a docstring.",
}
WAYS = {"plain": "(a) plain generate", "dflash": "(b) DFlash, signal off", "retrace": "(c) ReTrace"}
WARM_UP_TOKENS = 8
# A pipe has no width of its own, and the table should not be folded for it.
PIPED_WIDTH = 160


class OriginPrinter:
    """
    Writes pieces of text to a console: in colour where there is one, else with `[[ ]]` around what was drafted.

    Args:
        console (`rich.console.Console`): where to.
    """

    def __init__(self, console: Console):
        self.console = console
        self.in_colour = console.is_terminal and console.color_system is not None and not console.no_color
        self._open = False

    def legend(self):
        if self.in_colour:
            self._styled("drafted and accepted", True)
            self.console.print("  ", end="")
            self._styled("supplied by the target", False)
            self.console.print()
        else:
            self._raw("[[drafted and accepted]] supplied by the target\n")

    def write(self, text: str, drafted: bool):
        if self.in_colour:
            self._styled(text, drafted)
            return
        if drafted != self._open:
            self._raw("[[" if drafted else "]]")
            self._open = drafted
        self._raw(text)

    def end(self):
        if self._open:
            self._raw("]]")
            self._open = False
        self._raw("\n\n")

    def _styled(self, text: str, drafted: bool):
        style = "bold green" if drafted else "yellow"
        self.console.print(Text(text, style=style), end="", soft_wrap=True)

    def _raw(self, text: str):
        self.console.file.write(text)
        self.console.file.flush()


def run_demo(target, tokenizer, drafter, prompts: dict[str, str], max_new_tokens: int, console: Console):
    """
    Answers each prompt three ways and prints the text of the third as it comes, then one table.

    Args:
        target (`PreTrainedModel`): in eval mode.
        tokenizer (`PreTrainedTokenizerBase`): the target's, with a chat template.
        drafter (`RetraceDrafter`): a drafter for this target.
        prompts (`dict[str, str]`): kind of prompt to its text.
        max_new_tokens (`int`): tokens of an answer at most.
        console (`rich.console.Console`): where to print.

    Returns:
        `dict[str, dict[str, Run]]`: the timed runs, by kind of prompt and way.
    """
    options = {
        "plain": {},
        "dflash": {"drafter": drafter, "speculation_type": "dflash"},
        "retrace": {"drafter": drafter},
    }
    encoded = {
        kind: tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(target.device)
        for kind, prompt in prompts.items()
    }
    for way in WAYS:
        answer(target, next(iter(encoded.values())), WARM_UP_TOKENS, **options[way])

    printer = OriginPrinter(console)
    printer.legend()
    runs = {}
    for kind, inputs in encoded.items():
        console.print(Text(f"\n{kind}: {prompts[kind]}", style="bold"), soft_wrap=True)
        # Streamed once for the eye. Printing is no part of what the table compares, so the clock runs afterwards.
        answer(target, inputs, max_new_tokens, streamer=OriginStreamer(tokenizer, printer.write), **options["retrace"])
        printer.end()
        runs[kind] = {way: answer(target, inputs, max_new_tokens, **options[way]) for way in WAYS}

    console.print(results_table(runs))
    return runs


def results_table(runs: dict[str, dict[str, Run]]) -> Table:
    """
    What the demo measured, as a table: a block for each kind of prompt, and one for all of them pooled over rounds.

    Args:
        runs (`dict[str, dict[str, Run]]`): by kind of prompt and way, as [`run_demo`] returns them.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        caption="A pass is a target forward after the prefill; tau is the mean of tokens per pass, over passes. "
        "(b) runs the same weights without the trajectory. Accepted at slot k: of the blocks that proposed k or "
        "more tokens, how many per cent had k or more accepted. x (a), x (b): how many times faster. Greedy, float32.",
        caption_justify="left",
    )
    table.add_column("prompt")
    table.add_column("way", no_wrap=True)
    table.add_column("equal to (a)")
    for name in ("tokens", "passes", "tau"):
        table.add_column(name, justify="right")
    table.add_column("% accepted at slot 1, 2, ...")
    for name in ("seconds", "x (a)", "x (b)"):
        table.add_column(name, justify="right", no_wrap=True)

    pooled = {way: pool([by_way[way] for by_way in runs.values()]) for way in WAYS}
    for kind, by_way in {**runs, "all": pooled}.items():
        for way, run in by_way.items():
            table.add_row(
                kind if way == "plain" else "",
                WAYS[way],
                _equality(run.ids, by_way["plain"].ids) if way != "plain" else "",
                str(run.stats.new_tokens),
                str(run.stats.rounds),
                f"{run.stats.acceptance_length:.2f}",
                " ".join(f"{share * 100:.0f}" for share in run.stats.acceptance_at),
                f"{run.seconds:.2f}",
                f"{by_way['plain'].seconds / run.seconds:.2f}",
                f"{by_way['dflash'].seconds / run.seconds:.2f}",
                end_section=way == "retrace",
            )
    return table


def _equality(answers: list[list[int]], expected: list[list[int]]) -> str:
    if answers == expected:
        return "yes"
    if len(answers) > 1:
        return f"no, {sum(a != e for a, e in zip(answers, expected))} of {len(answers)} differ"
    pairs = list(zip(answers[0], expected[0]))
    first = next((i for i, (token, other) in enumerate(pairs) if token != other), len(pairs))
    return f"no, from token {first + 1}"


def find_drafter(path: str) -> Path:
    """
    The folder of a drafter: `path` as it is, or as seen from the root of this checkout, or the Hub's repository of
    that name.

    Raises:
        `FileNotFoundError`: it is in no such place.
    """
    for folder in (Path(path), Path(__file__).resolve().parents[1] / path):
        if (folder / "config.json").is_file():
            return folder
    try:
        if not Path(path).is_dir():
            return local_folder(path)
        why = "the folder has no config.json."
    except ValueError as error:
        why = str(error)
    raise FileNotFoundError(
        f"There is no drafter in {path}: {why} Run from the root of the repository, or name a trained "
        "drafter's folder or Hub id with --drafter."
    )


def demo(drafter: str, target: str, max_new_tokens: int, threads: int | None, console: Console | None = None):
    """
    Loads target and drafter in float32 and runs the demo on its three prompts.

    Args:
        drafter (`str`): folder or Hub id of the drafter.
        target (`str`): Hub id or folder of the target.
        max_new_tokens (`int`): tokens of an answer at most, at least 2.
        threads (`int`, *optional*): threads of torch; its own choice if left out.
        console (`rich.console.Console`, *optional*): where to print, standard output if left out.

    Raises:
        `ValueError`: a number out of range, or a drafter that does not fit the target.
        `OSError`: no such drafter or target.
    """
    if max_new_tokens < 2:
        raise ValueError(
            f"--max-new-tokens must be at least 2, got {max_new_tokens}: the prefill gives the first token."
        )
    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads must be at least 1, got {threads}.")
        torch.set_num_threads(threads)
    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=PIPED_WIDTH)
    folder = find_drafter(drafter)
    name = Path(drafter).name  # not the folder's: a Hub repository's is kept in one called by its revision
    model, tokenizer = load_target(target, dtype=torch.float32)
    assistant = RetraceDrafter.from_pretrained(folder, dtype=torch.float32).eval()
    console.print(
        f"target {model.name_or_path}, drafter {name}, float32, {torch.get_num_threads()} threads",
        soft_wrap=True,
        markup=False,
    )
    return run_demo(model, tokenizer, assistant, PROMPTS, max_new_tokens, console)
