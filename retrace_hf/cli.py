"""The command `retrace-hf`."""

from .terminal import run_command


try:
    import typer
except ImportError as error:
    raise ImportError("The command retrace-hf needs typer and rich: pip install 'retrace_hf[demo]'.") from error


app = typer.Typer(add_completion=False, no_args_is_help=True, help="ReTrace drafters for Hugging Face's generate().")


@app.callback()
def _commands():
    # With a callback typer keeps asking for a command's name while there is only one.
    pass


@app.command()
def demo(
    drafter: str = typer.Option("model_cards/retrace-smollm2-135m", help="Folder of the drafter."),
    target: str = typer.Option("HuggingFaceTB/SmolLM2-135M-Instruct", help="Hub id or folder of the target."),
    max_new_tokens: int = typer.Option(128, help="Tokens of an answer at most."),
    threads: int | None = typer.Option(None, help="Threads of torch; its own choice if left out."),
):
    """Answer three prompts plainly, with DFlash and with ReTrace, and compare."""
    from .demo import demo as run  # torch and transformers take a second; --help should not

    run(drafter, target, max_new_tokens, threads)


def main():
    """Entry point."""
    run_command(app, "retrace-hf")


if __name__ == "__main__":
    main()
