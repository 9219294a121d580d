"""Prompts of many kinds for training text: programs, texts to shorten, questions on a text, edits, translations.

    python examples/make_prompts.py --responses examples/data/responses_0.jsonl.gz --output runs/prompts.jsonl
    python examples/self_chat.py --prompts runs/prompts.jsonl --num_tokens 5000000 --length 512 --output_dir runs/mixed

The texts are answers that the target has written before (`--responses`) and docstrings of Python's standard library;
the programs are its short functions (PSF licence, read from the interpreter that runs this). So there are as many
prompts as are asked for and none is anyone's secret. The same arguments give the same file.
"""

import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

from retrace_hf.data.responses import read_responses
from retrace_hf.files import written_whole
from retrace_hf.terminal import run_command


# {text} stands behind or before the request, as users do both.
ON_TEXT = {
    "summary": (
        "Summarize the following text in {n} sentences.\n\n{text}",
        "{text}\n\nTL;DR in {n} sentences, please.",
        "Shorten this to half its length:\n\n{text}",
        "Give me {n} bullet points with the key ideas of this text:\n\n{text}",
        "What is this text about? Answer in one sentence.\n\n{text}",
        "Write a title and a one-line abstract for this:\n\n{text}",
    ),
    "question": (
        "Read the text and answer: what is its main claim?\n\n{text}",
        "{text}\n\nAccording to the text, why does this matter?",
        "Here is a passage:\n\n{text}\n\nWrite {n} questions about it, with answers.",
        "Answer from this context only. Context: {text}\n\nQuestion: who or what is it about?",
        "{text}\n\nWhich of these statements is the most important one, and why?",
        "List every name, number and term that is defined here:\n\n{text}",
    ),
    "edit": (
        "Rewrite this in simpler words for a ten year old:\n\n{text}",
        "Fix the grammar and make it more formal:\n\n{text}",
        "Turn the following into a friendly email:\n\n{text}",
        "Rewrite the text below as a numbered list of steps.\n\n{text}",
        "Put this into a table in Markdown:\n\n{text}",
        "Continue this text with one more paragraph:\n\n{text}",
        "Extract the facts of this text as JSON with the keys topic, facts and conclusion.\n\n{text}",
        "Translate into French:\n\n{text}",
        "Translate to Spanish: {text}",
    ),
}
ON_PROGRAM = (
    "Explain what this Python function does, step by step.\n\n```python\n{code}\n```",
    "Write a docstring for this function:\n\n```python\n{code}\n```",
    "```python\n{code}\n```\n\nIs there a bug in this code? Show the corrected function.",
    "Add type hints to the following function.\n\n```python\n{code}\n```",
    "Write three unit tests with pytest for\n\n```python\n{code}\n```",
    "Translate this Python code to JavaScript:\n\n```python\n{code}\n```",
    "Rename the variables in this function to clearer names and return the whole code.\n\n```python\n{code}\n```",
    "Refactor this function and explain your changes:\n\n```python\n{code}\n```",
    "What is the time complexity of `{name}`?\n\n```python\n{code}\n```",
    "Write a Python function `{name}({arguments})`.",
)
SOURCES = ("program", *ON_TEXT)


@dataclass
class Arguments:
    responses: list[str] = field(metadata={"help": "Files of responses whose answers are texts to work on."})
    output: str = field(metadata={"help": "File to write, .jsonl; an old one is replaced."})
    num_prompts: int = field(default=12_000, metadata={"help": "Prompts in all, as many of each kind."})
    max_characters: int = field(default=900, metadata={"help": "Characters of a text or program at most."})
    seed: int = field(default=0, metadata={"help": "Seed of the order and of the requests."})


def standard_library() -> list[Path]:
    return sorted(
        file
        for file in Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")
        if not {"site-packages", "test", "tests", "idle_test", "lib2to3"} & set(file.parts)
    )


def functions_and_texts(max_characters: int) -> tuple[list[dict], list[str]]:
    """Short functions of the standard library, and the paragraphs of its docstrings."""
    functions, texts = [], []
    for file in standard_library():
        try:
            source = file.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                texts += [p.strip() for p in (ast.get_docstring(node) or "").split("\n\n")]
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("__") and not node.decorator_list:
                code = ast.unparse(node)
                if 80 <= len(code) <= max_characters:
                    names = [argument.arg for argument in node.args.args if argument.arg != "self"]
                    functions.append({"code": code, "name": node.name, "arguments": ", ".join(names)})
    return functions, [text for text in dict.fromkeys(texts) if 200 <= len(text) <= max_characters]


def answered_texts(files: list[str], max_characters: int, rng: random.Random) -> list[str]:
    """The answers in these files, cut behind a sentence at a length drawn for each."""
    texts = []
    for file in files:
        for row in read_responses(file):
            if "messages" not in row:
                raise ValueError(f"{file} holds rows of tokens without text; give files of responses with messages.")
            text = row["messages"][-1]["content"][: rng.randint(200, max_characters)]
            end = max(text.rfind(mark) for mark in (". ", ".\n", "\n\n"))
            texts.append(text[: end + 1].strip() if end > 120 else text.strip())
    return [text for text in texts if len(text) > 120]


def prompts(args: Arguments) -> Iterator[dict]:
    rng = random.Random(args.seed)
    functions, documented = functions_and_texts(args.max_characters)
    answers = answered_texts(args.responses, args.max_characters, rng)
    rng.shuffle(functions)
    rng.shuffle(answers)
    rng.shuffle(documented)
    # Two of three texts are the target's own prose, the third a docstring, while both last.
    texts = answers + documented[: len(answers) // 2]
    rng.shuffle(texts)
    for number in range(args.num_prompts):
        source, turn = SOURCES[number % len(SOURCES)], number // len(SOURCES)
        if source == "program":
            prompt = rng.choice(ON_PROGRAM).format(**functions[turn % len(functions)])
        else:
            # Each kind starts elsewhere among the texts.
            place = turn + SOURCES.index(source) * len(texts) // len(SOURCES)
            prompt = rng.choice(ON_TEXT[source]).format(text=texts[place % len(texts)], n=rng.choice("234"))
        yield {"id": f"{source}-{args.seed}-{turn}", "source": source, "prompt": prompt}


def main():
    (args,) = HfArgumentParser(Arguments, allow_abbrev=False).parse_args_into_dataclasses()
    for name, least in (("num_prompts", 1), ("max_characters", 300)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} must be at least {least}, got {getattr(args, name)}.")
    Path(args.output).absolute().parent.mkdir(parents=True, exist_ok=True)
    rows = list(prompts(args))
    with written_whole(Path(args.output)) as temporary:
        temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(json.dumps({"prompts": len(rows), "characters": sum(len(row["prompt"]) for row in rows)}))


if __name__ == "__main__":
    run_command(main, "make_prompts")
