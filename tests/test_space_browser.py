"""The page of examples/space in a real browser: `make test-browser`.

It runs from a folder laid out as the Space is, on a tiny target whose every word is HTML or a template, and on SmolLM2
with its shipped drafter.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from .fixtures import letters_chat_target, randomize, tiny_drafter


pytestmark = [pytest.mark.browser, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
WORDS = (
    "<img src=x onerror='window.hit=1'>",
    "<script>window.hit=1</script>",
    "</span></div>",
    "${window.hit=1}",
    "{{value}}",
    "&lt;",
    "\n",
    "<b>",
)
PATIENCE = 240  # seconds


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """Starts the page with these environment variables and returns its address."""
    started = []

    def start(folder: Path = ROOT / "examples" / "space", **variables: object) -> str:
        port = free_port()
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "GRADIO_SERVER_PORT": str(port), "PYTHONPATH": str(ROOT)}
        env |= {name: str(value) for name, value in variables.items()}
        log = tmp_path_factory.mktemp("log") / "page.log"
        with open(log, "wb") as output:
            process = subprocess.Popen([sys.executable, "app.py"], cwd=folder, env=env, stdout=output, stderr=output)
        started.append(process)
        address = f"http://127.0.0.1:{port}/"
        until = time.monotonic() + PATIENCE
        while True:
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            try:
                urllib.request.urlopen(address, timeout=5).close()
                return address
            except OSError:
                time.sleep(0.2)

    yield start
    for process in started:
        process.terminate()
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A Space of its own, drafter included, and the folder of a target that says nothing but `WORDS`."""
    space, folder = tmp_path_factory.mktemp("space"), tmp_path_factory.mktemp("target")
    target, tokenizer = letters_chat_target(seed=1)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    numbers = state["model"]["vocab"]
    # Each word with its number, so that all are different.
    state["model"]["vocab"] = {
        word if word == "[UNK]" else f"{WORDS[i % len(WORDS)]}{i}": i for word, i in numbers.items()
    }
    (folder / "hostile.json").write_text(json.dumps(state))
    words = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "hostile.json"), unk_token="[UNK]", eos_token="<|end|>"
    )
    words.chat_template = tokenizer.chat_template
    words.save_pretrained(folder)
    with torch.no_grad():  # long answers
        target.get_output_embeddings().weight[target.config.eos_token_id] = 0
    target.config.max_position_embeddings = 4096
    target.save_pretrained(folder)
    shutil.copytree(ROOT / "examples" / "space", space, dirs_exist_ok=True)
    shutil.copytree(ROOT / "retrace_hf", space / "retrace_hf")
    randomize(tiny_drafter(target)).save_pretrained(space / "drafter")
    return space, folder


@pytest.fixture(scope="module")
def address(serve, hostile):
    space, target = hostile
    limits = {"RETRACE_MAX_NEW_TOKENS": 1500, "RETRACE_MAX_PROMPT_TOKENS": 60}
    return serve(space, RETRACE_TARGET=target, PYTHONPATH="", **limits)


@pytest.fixture
def browser():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1000"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium")
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def find(browser, selector: str):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, PATIENCE).until(lambda b: b.find_element(By.CSS_SELECTOR, selector))


def text_of(browser, selector: str) -> str:
    return browser.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)


def wait_for(browser, selector: str, words: str) -> str:
    until = time.monotonic() + PATIENCE
    while words not in (text := text_of(browser, selector)):
        assert time.monotonic() < until, (selector, text, find(browser, "body").text)
        time.sleep(0.05)
    return text


def ask(browser, prompt: str, new_tokens: int | None = None):
    """Types a prompt, and a limit where one is given, and presses the button."""
    from selenium.webdriver.common.keys import Keys

    box = find(browser, "#prompt textarea")
    box.send_keys(Keys.CONTROL, "a")
    box.send_keys(Keys.DELETE, prompt)
    if new_tokens is not None:
        number = find(browser, "#new-tokens input[type=number]")
        number.send_keys(Keys.CONTROL, "a")
        number.send_keys(str(new_tokens), Keys.TAB)
    find(browser, "#start").click()


def spans_of(browser, column: str) -> list[list[str]]:
    script = "return [...document.querySelectorAll(arguments[0])].map(span => [span.className, span.textContent])"
    return browser.execute_script(script, f"#{column} .answer span")


def test_hostile_text_streams_as_text(browser, address):
    browser.get(address)
    ask(browser, "<b>abcd</b>", new_tokens=100)
    wait_for(browser, "#retrace", "target passes")
    assert "Text equal: yes" in wait_for(browser, "#verdict", "Text equal")
    retrace, plain = spans_of(browser, "retrace"), spans_of(browser, "plain")
    assert "".join(text for _, text in retrace) == "".join(text for _, text in plain) != ""
    assert {name for name, _ in plain} == {"target"} and {name for name, _ in retrace} <= {"target", "drafted"}
    shown = "".join(text for _, text in plain)
    assert sum(word in shown for word in WORDS) > len(WORDS) // 2
    assert browser.execute_script("return window.hit === undefined")
    tags = "return [...document.querySelectorAll('#plain .answer *, #retrace .answer *')].map(e => e.tagName)"
    assert set(browser.execute_script(tags)) == {"SPAN"}
    assert "100 tokens, 99 target passes, tau 1.00" in text_of(browser, "#plain .counts")


@pytest.mark.parametrize(("prompt", "message"), [(" ", "prompt is empty"), ("ab" * 80, "may have 60")])
def test_prompts_that_are_turned_away_and_the_next_one(browser, address, prompt, message):
    browser.get(address)
    ask(browser, prompt)
    wait_for(browser, "#verdict", message)
    assert spans_of(browser, "plain") == []
    ask(browser, "abcd", new_tokens=10)
    wait_for(browser, "#verdict", "Text equal: yes")


def test_two_visitors_at_once(browser, address):
    browser.get(address)
    first = browser.current_window_handle
    ask(browser, "abcd", new_tokens=60)
    browser.switch_to.new_window("window")
    browser.get(address)
    ask(browser, "efghijkl", new_tokens=60)
    wait_for(browser, "#verdict", "Text equal: yes")
    second_text = text_of(browser, "#plain .answer")
    browser.switch_to.window(first)
    wait_for(browser, "#verdict", "Text equal: yes")
    assert "" != text_of(browser, "#plain .answer") != second_text != ""


@pytest.mark.parametrize("how", ["stop", "leave"])
def test_who_stops_or_leaves_makes_room_for_the_next(browser, address, how):
    browser.get(address)
    ask(browser, "abcdef", new_tokens=1500)
    started = time.monotonic()
    wait_for(browser, "#retrace .counts", ", tau ")
    time.sleep(3)
    tokens = int(text_of(browser, "#retrace .counts").split(" tokens")[0])
    left = (3000 - tokens) * (time.monotonic() - started) / tokens  # seconds that both columns would take
    assert tokens < 1000
    if how == "stop":
        find(browser, "#stop").click()
    else:
        leaving = browser.current_window_handle
        browser.switch_to.new_window("window")
        new = browser.current_window_handle
        browser.switch_to.window(leaving)
        browser.close()
        browser.switch_to.window(new)
        browser.get(address)
    started = time.monotonic()
    ask(browser, "abcd", new_tokens=10)
    wait_for(browser, "#plain .counts", "10 tokens")
    assert time.monotonic() - started < left / 3


@pytest.mark.timeout(1200)
def test_the_shipped_drafter_answers(browser, serve, tmp_path):
    browser.get(serve())
    ask(
        browser,
        "A baker makes 24 rolls an hour for 5 hours and sells each for 3 dollars. What does she earn?",
        new_tokens=96,
    )
    wait_for(browser, "#retrace .counts", " s")
    wait_for(browser, "#verdict", "Text equal: yes")
    origins = {name for name, _ in spans_of(browser, "retrace")}
    assert origins == {"drafted", "target"}
    # RETRACE_SCREENSHOT=examples/space/screenshot.png make test-browser takes the picture anew.
    picture = Path(os.environ.get("RETRACE_SCREENSHOT") or tmp_path / "screenshot.png")
    assert browser.save_screenshot(str(picture)) and picture.stat().st_size < 200_000
