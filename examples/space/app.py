"""
A page that answers a prompt with ReTrace and plainly, side by side, with the accepted drafts coloured.

    pip install -r examples/space/requirements.txt
    python examples/space/app.py

Models and limits come from environment variables, see README.md beside this file.
"""

import html
from collections.abc import Iterator

import gradio as gr
from side_by_side import (
    LEGEND,
    STYLE,
    Models,
    Settings,
    answer_html,
    answer_twice,
    load_models,
    verdict,
)

from retrace_hf.terminal import run_command


EXAMPLES = [
    "Why is the sky blue?",
    "A baker makes 24 rolls an hour and sells each for 3 dollars. She bakes for 5 hours. How much does she earn?",
    "Write a Python function that counts how often each word occurs in a text, with a docstring.",
]


def build_page(models: Models, settings: Settings) -> gr.Blocks:
    """The page; the models are loaded, the server is not started."""

    def respond(prompt: str, max_new_tokens: float) -> Iterator[tuple[str, str, str]]:
        try:
            for retrace, plain in answer_twice(models, prompt or "", int(max_new_tokens), settings):
                yield answer_html(retrace), answer_html(plain), verdict(retrace, plain)
        except ValueError as error:  # said for the visitor
            yield answer_html(None), answer_html(None), html.escape(str(error))

    with gr.Blocks(title="ReTrace", analytics_enabled=False) as page:
        gr.Markdown(
            "# ReTrace beside plain generate\n"
            "A drafter proposes a block of tokens, the target checks it in one pass, and what was rejected goes into "
            "the next block. The text is the target's own either way."
        )
        prompt = gr.Textbox(label="Prompt", lines=3, elem_id="prompt")
        limit = settings.max_new_tokens
        max_new_tokens = gr.Slider(
            2, limit, value=min(128, limit), step=1, label="New tokens at most", elem_id="new-tokens"
        )
        with gr.Row():
            start = gr.Button("Answer", variant="primary", elem_id="start")
            stop = gr.Button("Stop", elem_id="stop")
        gr.HTML(LEGEND)
        with gr.Row():
            with gr.Column():
                gr.Markdown("### ReTrace")
                retrace = gr.HTML(answer_html(None), elem_id="retrace")
            with gr.Column():
                gr.Markdown("### Plain generate")
                plain = gr.HTML(answer_html(None), elem_id="plain")
        result = gr.HTML(elem_id="verdict")
        gr.Examples(EXAMPLES, prompt)
        # One visitor at a time, the others queue: two at once would share the cores, and both clocks would be wrong.
        answering = start.click(
            respond, [prompt, max_new_tokens], [retrace, plain, result], concurrency_limit=1, api_name="answer"
        )
        stop.click(None, cancels=[answering])
    return page.queue(max_size=32)


def main():
    settings = Settings.from_environment()
    build_page(load_models(settings), settings).launch(css=STYLE)


if __name__ == "__main__":
    run_command(main, "app.py")
