"""The command `retrace-hf`."""

import json
import sys

from .terminal import run_command


try:
    import typer
    from typer.core import TyperCommand
except ImportError as error:
    raise ImportError("The command retrace-hf needs typer and rich: pip install 'retrace_hf[demo]'.") from error


app = typer.Typer(add_completion=False, no_args_is_help=True, help="ReTrace drafters for Hugging Face's generate().")


@app.callback()
def _commands():
    # With a callback typer keeps asking for a command's name while there is only one.
    pass


@app.command()
def demo(
    drafter: str = typer.Option("model_cards/retrace-smollm2-135m", help="Folder or Hub id of the drafter."),
    target: str = typer.Option("HuggingFaceTB/SmolLM2-135M-Instruct", help="Hub id or folder of the target."),
    max_new_tokens: int = typer.Option(128, help="Tokens of an answer at most."),
    threads: int | None = typer.Option(None, help="Threads of torch; its own choice if left out."),
):
    """Answer three prompts plainly, with DFlash and with ReTrace, and compare."""
    from .demo import demo as run  # torch and transformers take a second; --help should not

    run(drafter, target, max_new_tokens, threads)


@app.command()
def prepare(
    source: str = typer.Argument(help="Hub dataset id, folder, .jsonl, .jsonl.gz, .json or .parquet file."),
    output_dir: str = typer.Option(..., help="Folder for the data; made if missing."),
    target: str = typer.Option("HuggingFaceTB/SmolLM2-135M-Instruct", help="Hub id or folder of the target."),
    split: str = typer.Option("train", help="Split of a dataset."),
    config: str | None = typer.Option(None, help="Config of a dataset."),
    column: str | None = typer.Option(None, help="Texts or messages; messages, conversations or prompt if left out."),
    limit: int | None = typer.Option(None, help="Rows read at most."),
    system_prompt: str | None = typer.Option(None, help="For conversations that have none of their own."),
    keep_answers: bool = typer.Option(False, "--keep-answers", help="The data's answers are the target's already."),
    dtype: str = typer.Option("float32", help="dtype of the target: float32, bfloat16 or float16."),
    device: str = typer.Option("cpu", help="Where the target runs."),
    batch_size: int = typer.Option(16, help="Prompts answered at once."),
    endpoint: str | None = typer.Option(None, help="URL of an OpenAI-compatible server that runs the target."),
    model: str | None = typer.Option(None, help="The target's name on the server; its only one if left out."),
    api_key_env: str = typer.Option("OPENAI_API_KEY", help="Environment variable with the server's API key."),
    concurrency: int = typer.Option(32, help="Requests to the server at once."),
    request_timeout: float = typer.Option(600.0, help="Seconds to wait for the server."),
    retries: int = typer.Option(5, help="How often a request to the server is sent again."),
    max_new_tokens: int = typer.Option(224, help="Tokens of an answer at most."),
    temperature: float = typer.Option(0.0, help="0 is greedy."),
    top_p: float = typer.Option(1.0, help="With a temperature."),
    top_k: int = typer.Option(0, help="With a temperature; 0 keeps all."),
    seed: int = typer.Option(0, help="With a temperature."),
    enable_thinking: bool | None = typer.Option(
        None, "--enable-thinking/--no-enable-thinking", help="For the chat template; its own default if left out."
    ),
    max_length: int | None = typer.Option(None, help="Tokens kept of a row."),
    shard_size: int = typer.Option(256, help="Prompts of a shard; an interrupt loses one at most."),
):
    """Let the target answer prompts, and make tokens with loss masks of it. A stopped run goes on when repeated."""
    options = dict(locals())
    try:
        from .data.prepare import PrepareOptions
        from .data.prepare import prepare as run

        counts = run(PrepareOptions(**options))
    except KeyboardInterrupt:
        print("retrace-hf: stopped; what is written is kept, and the same command goes on.", file=sys.stderr)
        raise typer.Exit(130) from None
    print(json.dumps(counts, ensure_ascii=False))
    print(
        f"To train on it: python examples/train_retrace.py --target {target} --responses "
        f"{output_dir}/tokens_*.jsonl.gz --output_dir ..."
    )


class _SeveralValues(TyperCommand):
    """A command without arguments. Options that may be repeated also take several values at once: `--data a b` and
    `--data=a b` are `--data a --data b`."""

    def parse_args(self, ctx, args):
        repeatable = {name for option in self.params if option.multiple for name in option.opts}
        spread, current = [], None
        for part in args:
            if part.startswith("-"):
                name, has_value, _ = part.partition("=")
                current = name if name in repeatable else None
                first = current is not None and not has_value
            elif current is not None and not first:
                spread.append(current)
            else:
                first = False
            spread.append(part)
        return super().parse_args(ctx, spread)


_SETS = "mt-bench, humaneval, gsm8k, math500, alpaca, livecodebench"
_MANY = "Several after one another, or the option repeated."
_DRAFTERS = typer.Option(..., "--drafter", help=f"Folder or Hub id, NAME=FOLDER to name its row. {_MANY}")
_DATA = typer.Option(
    ..., "--data", help=f"Sets by name ({_SETS}; NAME=PATH where it was downloaded), or FILE.jsonl. {_MANY}"
)
_TEMPERATURES = typer.Option([0.0, 1.0], "--temperature", help=f"0 is greedy. {_MANY}")


@app.command(cls=_SeveralValues)
def benchmark(
    drafter: list[str] = _DRAFTERS,
    data: list[str] = _DATA,
    output_dir: str = typer.Option(..., help="Folder for results.json, results.md and plots; made if missing."),
    target: str = typer.Option("HuggingFaceTB/SmolLM2-135M-Instruct", help="Hub id or folder of the target."),
    temperature: list[float] = _TEMPERATURES,
    max_new_tokens: int = typer.Option(8192, help="Tokens of an answer at most."),
    limit: int | None = typer.Option(None, help="Prompts of each kind at most; the paper's numbers if left out."),
    seed: int = typer.Option(42, help="Of the draw of prompts, and of sampling."),
    top_p: float = typer.Option(0.95, help="With a temperature."),
    top_k: int = typer.Option(20, help="With a temperature; 0 keeps all."),
    prompt_lookup: bool = typer.Option(False, "--prompt-lookup", help="Compare transformers' prompt lookup too."),
    assistant_model: str | None = typer.Option(None, help="Compare assisted generation with this small model too."),
    dtype: str = typer.Option("float32", help="float32, bfloat16 or float16."),
    device: str = typer.Option("cpu", help="Where all of it runs."),
    threads: int | None = typer.Option(None, help="Threads of torch; its own choice if left out."),
    plots: bool = typer.Option(True, "--plots/--no-plots", help="Draw them (needs matplotlib)."),
):
    """Compare drafters with plain generate() and transformers' own DFlash. A stopped run goes on when repeated."""
    options = dict(locals())
    try:
        from .evaluation.benchmark import TABLE, BenchmarkOptions, mismatch_report
        from .evaluation.benchmark import benchmark as run

        results = run(BenchmarkOptions(**options))
    except KeyboardInterrupt:
        print("retrace-hf: stopped; what is measured is kept, and the same command goes on.", file=sys.stderr)
        raise typer.Exit(130) from None
    print(f"{output_dir}/{TABLE} is written.")
    mismatches = mismatch_report(results)
    for line in mismatches:
        print(f"retrace-hf: MISMATCH: {line}", file=sys.stderr)
    if mismatches and dtype == "float32":
        print(
            f"retrace-hf: {len(mismatches)} greedy answers are not plain's, and in float32 all should be.",
            file=sys.stderr,
        )
        raise typer.Exit(1)


_DATASET = typer.Option(None, help="Hub id of data it was trained on; may be repeated.")


@app.command()
def card(
    folder: str = typer.Argument(help="Folder of the drafter, with results.json and training.json if any."),
    base_model: str | None = typer.Option(None, help="Hub id of the target; what training.json or the card says."),
    license: str | None = typer.Option(None, help="As the Hub names it, e.g. apache-2.0; what the card says."),
    dataset: list[str] | None = _DATASET,
    repo_id: str | None = typer.Option(None, help="Hub id of the drafter; what the card says, or org/FOLDER."),
    check: bool = typer.Option(False, "--check", help="Write nothing; exit status 1 if README.md is not current."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Also replace a README.md that was written by hand."),
):
    """Render the model card, README.md, of a drafter's folder; no figure on it is typed by hand."""
    from .card import card_is_current, write_card

    options = {"base_model": base_model, "license": license, "datasets": dataset, "repo_id": repo_id}
    if not check:
        write_card(folder, overwrite=overwrite, **options)
        print(f"{folder}/README.md is written.")
    elif card_is_current(folder, **options):
        print(f"{folder}/README.md is current.")
    else:
        print(f"{folder}/README.md is not current; `retrace-hf card {folder}` renders it.", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def convert(
    source: str = typer.Argument(help="Folder or Hub id of a drafter; its format is recognised."),
    output: str = typer.Argument(help="Folder to write."),
    to: str = typer.Option(..., help="retrace, z-lab (SGLang, vLLM), native (transformers) or speculators (vLLM)."),
    target: str | None = typer.Option(None, help="Hub id or folder of the target; speculators needs it."),
    revision: str | None = typer.Option(None, help="Of the source on the Hub."),
    dtype: str | None = typer.Option(None, help="float32, bfloat16 or float16; the source's if left out."),
    drop_conditioning: bool = typer.Option(
        False, "--drop-conditioning", help="Write a ReTrace's DFlash backbone alone; its tau is then the backbone's."
    ),
    drop_rope_scaling: bool = typer.Option(False, "--drop-rope-scaling", help="Write rope_theta without its scaling."),
    drop_draft_vocabulary: bool = typer.Option(
        False, "--drop-draft-vocabulary", help="Let a drafter of a part of the vocabulary draft among all of it."
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace a checkpoint that is in OUTPUT."),
):
    """Write a drafter in the format of another project, or one of another project in ours, bit for bit."""
    options = dict(locals())
    from .export import convert as run

    for sentence in run(**options):
        print(sentence)
    print(f"{output} is written ({to}).")


def main():
    """Entry point."""
    run_command(app, "retrace-hf")


if __name__ == "__main__":
    main()
