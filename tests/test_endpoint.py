"""Answers from an OpenAI-compatible server: a small one on this machine that a tiny target stands behind."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from retrace_hf.data.endpoint import EndpointAnswers, ServerGone
from retrace_hf.data.prepare import PrepareOptions, prepare
from retrace_hf.data.prompts import render_prompt
from retrace_hf.data.responses import Answer, Failure, read_responses, stop_ids

from .fixtures import letters_chat_target, save_letters_target
from .test_prepare import conversation, rows_of, write_lines


KEY = "sk-very-secret"


class Server(ThreadingHTTPServer):
    """Answers as vLLM does, or as `plan` says: one entry a request, as long as there are any."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.tokenizer = letters_chat_target()
        self.plan, self.requests, self.lock = [], [], threading.Lock()
        self.key, self.models, self.token_ids, self.changes = None, ["tiny"], True, {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def complete(self, body: dict) -> dict:
        prompt_ids = render_prompt(self.tokenizer, body["messages"], **body.get("chat_template_kwargs", {}))
        output = self.target.generate(
            input_ids=torch.tensor([prompt_ids]), max_new_tokens=body["max_tokens"], do_sample=False, pad_token_id=0
        )
        ids = output[0, len(prompt_ids) :].tolist()
        stopped = ids[-1] in self.target.generation_config.eos_token_id
        choice = {
            "message": {"role": "assistant", "content": self.tokenizer.decode(ids[:-1] if stopped else ids)},
            "finish_reason": "stop" if stopped else "length",
        }
        result = {
            "choices": [choice],
            "usage": {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)},
        }
        if body.get("return_token_ids") and self.token_ids:
            choice["token_ids"], result["prompt_token_ids"] = ids, prompt_ids
        choice |= self.changes.get("choice", {})
        choice["message"] |= self.changes.get("message", {})
        return result | self.changes.get("result", {})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def _send(self, status: int, body, **headers):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, message: str):
        self._send(status, {"error": {"message": message}})

    def _key_is_wrong(self) -> bool:
        wrong = self.server.key is not None and self.headers.get("Authorization") != f"Bearer {self.server.key}"
        if wrong:
            self._refuse(401, f"Incorrect API key: {self.headers.get('Authorization')}")
        return wrong

    def do_GET(self):
        if self.path != "/v1/models":
            self._refuse(404, "Not Found")
        elif not self._key_is_wrong():
            self._send(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((time.monotonic(), body))
            planned = self.server.plan.pop(0) if self.server.plan else "ok"
        if self.path != "/v1/chat/completions":
            self._refuse(404, "Not Found")
        elif self._key_is_wrong():
            return
        elif planned == "hang":
            time.sleep(1.5)
            self.close_connection = True
        elif planned == "broken":
            self._send(200, '{"choices": [{"mess')
        elif planned == "other":
            self._send(200, {"object": "error"})
        elif planned == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"{")
            self.close_connection = True
        elif planned == "wait":
            self._send(429, {"error": {"message": "slow down"}}, Retry_After=0.4)
        elif isinstance(planned, tuple):
            self._refuse(*planned)
        elif body["model"] not in self.server.models:
            self._refuse(404, f"The model `{body['model']}` does not exist.")
        else:
            with self.server.lock:
                result = self.server.complete(body)
            self._send(200, result)


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def answers(server, **changes) -> EndpointAnswers:
    ends = stop_ids(server.target.generation_config, server.tokenizer)
    fixed = {"max_new_tokens": 12, "timeout": 1.0, "retries": 3, "backoff": 0.02, "concurrency": 2}
    return EndpointAnswers(server.url, server.tokenizer, ends, **{**fixed, **changes})


def ask(answer: EndpointAnswers, number: int = 1) -> list:
    requests = [(f"p{i}", conversation(i, 1)["messages"][:1]) for i in range(number)]
    return answer(requests, 0, 0, lambda tokens: None)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("endpoint")
    save_letters_target(home / "target")
    write_lines(home / "prompts.jsonl", *(conversation(i, turns=1 + i % 2) for i in range(6)))
    return home


def options(home, output_dir, **changes) -> PrepareOptions:
    fixed = {"target": str(home / "target"), "max_new_tokens": 12, "shard_size": 3, "progress": False}
    return PrepareOptions(source=str(home / "prompts.jsonl"), output_dir=str(output_dir), **fixed | changes)


def test_a_server_gives_what_the_target_here_gives(server, home, tmp_path):
    prepare(options(home, tmp_path / "here"))
    for name, token_ids in (("ids", True), ("text", False)):
        server.token_ids, server.plan = token_ids, ["wait", (500, "no"), "broken", "other", "cut", (503, "busy")]
        counts = prepare(options(home, tmp_path / name, endpoint=server.url, concurrency=3))
        assert counts["server"] == {"with_token_ids" if token_ids else "retokenized": 9} and counts["answered"] == 6
        assert json.loads((tmp_path / name / "prepare.json").read_text())["endpoint"] == server.url
    assert rows_of(tmp_path / "ids", "responses") == rows_of(tmp_path / "here", "responses")
    assert rows_of(tmp_path / "ids", "tokens") == rows_of(tmp_path / "here", "tokens")
    # A server of text alone does not say which token ended it.
    for row, other in zip(rows_of(tmp_path / "here", "responses"), rows_of(tmp_path / "text", "responses")):
        assert row["response_ids"] == other["response_ids"] and row["messages"] == other["messages"]
    with pytest.raises(ValueError, match="made otherwise: answers was 'target', now 'server'"):
        prepare(options(home, tmp_path / "here", endpoint=server.url))


def test_what_is_asked(server):
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 4}
    kwargs = {"enable_thinking": False}
    ask(answers(server, sampling=sampling, chat_template_kwargs=kwargs, seed=1), 2)
    (_, first), (_, second) = sorted(server.requests, key=lambda request: request[1]["messages"][0]["content"])
    assert first["seed"] != second["seed"]
    assert sampling.items() <= first.items() and first["chat_template_kwargs"] == kwargs
    assert (first["model"], first["max_tokens"], first["return_token_ids"]) == ("tiny", 12, True)
    ask(answers(server))
    greedy = server.requests[-1][1]
    assert greedy["temperature"] == 0 and not {"seed", "top_p", "top_k", "chat_template_kwargs"} & set(greedy)


def test_trouble_is_tried_again(server):
    (undisturbed,) = ask(answers(server))
    for plan in (["hang"], ["broken", "other", "cut"], ["wait"], [(500, "no"), (502, "no"), (408, "no")]):
        server.plan, server.requests = list(plan), []
        assert ask(answers(server)) == [undisturbed]
        came = [moment for moment, _ in server.requests]
        assert len(came) == len(plan) + 1
        for wait, before, after in zip(
            {"hang": [1.0], "wait": [0.4]}.get(plan[0], [0.02, 0.04, 0.08]), came, came[1:]
        ):
            assert after - before >= wait
    # A server that knows no token ids at all is asked without.
    server.plan, server.token_ids = [(400, "Unrecognized request argument: return_token_ids")], False
    answer = answers(server)
    (text,) = ask(answer)
    assert text.ids == undisturbed.ids and "return_token_ids" not in server.requests[-1][1]
    ask(answer)
    assert "return_token_ids" not in server.requests[-1][1]


def test_prompts_that_the_server_fails_are_named(server):
    def only(plan=(), **changes):
        server.plan, server.changes = list(plan), changes
        (failure,) = ask(answers(server))
        assert isinstance(failure, Failure)
        return failure.reason, failure.again

    assert only([(400, "maximum context length is 10")]) == ("too long", False)
    assert only([(400, "bad message")]) == ("refused by the server", False)
    assert only([(500, "no")] * 4) == ("server", True)
    assert only(choice={"finish_reason": "content_filter"}) == ("finish reason", False)
    server.token_ids = False
    assert only(message={"reasoning_content": "Hm."}) == ("reasoning", False)
    assert only(message={"content": "no such letters"}) == ("no round trip", False)


def test_text_that_was_split_otherwise_is_counted(server):
    server.token_ids = False
    server.changes = {"result": {"usage": {"prompt_tokens": 1, "completion_tokens": 99}}}
    answer = answers(server)
    ask(answer)
    assert answer.counts == {"retokenized": 1, "retokenized_otherwise": 1, "prompt_length_differs": 1}
    # Token ids without the token that ended them: it is the template's.
    server.token_ids, server.changes = True, {"choice": {"token_ids": [5, 6], "finish_reason": "stop"}}
    assert ask(answer) == [Answer([5, 6], server.tokenizer.decode([5, 6]), server.tokenizer.eos_token_id)]


def test_another_tokenizer_is_found_out(server):
    for changes in ({"result": {"prompt_token_ids": [1, 2]}}, {"choice": {"token_ids": [10**6]}}):
        server.changes = changes
        with pytest.raises(ValueError, match="another tokenizer or chat template.*--target"):
            ask(answers(server))


def test_keys_models_and_addresses(server, home, tmp_path, monkeypatch, caplog):
    server.key = KEY
    with pytest.raises(ValueError, match="wants an API key.*environment variable OPENAI_API_KEY"):
        answers(server)
    monkeypatch.setenv("MY_KEY", "sk-wrong-key")
    with pytest.raises(ValueError, match="refuses the API key .HTTP 401: Incorrect API key: Bearer [*]{3}") as error:
        answers(server, api_key_env="MY_KEY")
    assert "sk-wrong-key" not in str(error.value)
    monkeypatch.setenv("MY_KEY", KEY)
    with caplog.at_level("DEBUG"):
        prepare(options(home, tmp_path, endpoint=server.url, api_key_env="MY_KEY"))
    assert KEY not in caplog.text
    assert not any(KEY.encode() in path.read_bytes() for path in tmp_path.iterdir())
    server.key = None
    with pytest.raises(ValueError, match="no model 'other'; there are 'tiny'"):
        answers(server, model="other")
    server.models = ["a", "b"]
    with pytest.raises(ValueError, match="several models; there are 'a', 'b'"):
        answers(server)
    answer = answers(server, model="a")
    server.models = ["b"]
    with pytest.raises(ValueError, match="no model 'a'.*does not exist"):
        ask(answer)
    server.key = KEY
    with pytest.raises(ValueError, match="wants an API key"):
        ask(answer)
    for url, message in (
        ("localhost:8000", "must be a URL"),
        ("http://me:pass@localhost", "neither a password"),
        ("http://localhost?key=1", "neither a password"),
        (server.url + "/v2", "no list of models .HTTP 404"),
    ):
        with pytest.raises(ValueError, match=message):
            EndpointAnswers(url, server.tokenizer, set())
    assert EndpointAnswers(server.url + "/v2/", server.tokenizer, set(), model="x").url == server.url + "/v2"
    with pytest.raises(OSError, match="does not answer"):
        EndpointAnswers("http://127.0.0.1:1", server.tokenizer, set())


def test_a_server_that_is_gone_stops_the_run_and_the_next_goes_on(server, home, tmp_path):
    here = tmp_path / "whole"
    prepare(options(home, here, endpoint=server.url))
    run = options(home, tmp_path / "out", endpoint=server.url, retries=0, concurrency=1, request_timeout=5.0)
    server.plan = ["ok"] * 4 + [(500, "no")] * 2
    with pytest.raises(ServerGone, match="failed 2 prompts in a row.*HTTP 500: no.*the same command goes on"):
        prepare(run)
    assert [path.name for path in (tmp_path / "out").glob("report_*")] == ["report_00000.json"]
    # One prompt that fails for good is left out, and asked again by the next run; nobody else is.
    server.plan = ["ok", (500, "no")]
    assert prepare(run)["left_out"] == {"server": 1}
    asked = len(server.requests)
    counts = prepare(run)
    assert counts["left_out"] == {} and 0 < len(server.requests) - asked <= 2
    assert rows_of(tmp_path / "out", "responses") == rows_of(here, "responses")
    assert list(read_responses(tmp_path / "out" / "tokens_00001.jsonl.gz")) == list(
        read_responses(here / "tokens_00001.jsonl.gz")
    )
