"""
Answers of a target that runs elsewhere, behind an OpenAI-compatible server such as vLLM's or SGLang's.

Token ids are asked for (`return_token_ids`, vLLM). Where the server has none the text is tokenised anew, and must then
decode to itself.
"""

import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import Callable
from urllib.parse import urlsplit

from huggingface_hub.utils import httpx

from .prompts import check_chat_template, render_prompt
from .responses import Answer, Failure, check_sizes, to_answer


# What a server says when it is busy, restarting or behind a proxy that is.
_BUSY = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_MAX_WAIT_SECONDS = 60.0
_SHOWN_CHARACTERS = 300


class ServerGone(OSError):
    """The server did not answer time and again: there is no use in asking for the rest."""


class EndpointAnswers:
    """
    Answers of an OpenAI-compatible server, several at a time. The API key is read from the environment and is neither
    logged nor written anywhere.

    Args:
        url (`str`): of the server, with or without `/v1`.
        tokenizer (`PreTrainedTokenizerBase`): the target's, with a chat template and an end token.
        stop_ids (`set[int]`): the tokens that end an answer.
        model (`str`, *optional*): its name on the server; the only one there is if left out.
        max_new_tokens (`int`, *optional*, defaults to 224): tokens of an answer at most.
        sampling (`dict`, *optional*): `temperature`, `top_p`, `top_k`; greedy without it.
        seed (`int`, *optional*, defaults to 0): every prompt and turn has its own.
        chat_template_kwargs (`dict`, *optional*): passed to the chat template, by the server.
        api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`): the environment variable with the key.
        concurrency (`int`, *optional*, defaults to 32): requests under way at once.
        timeout (`float`, *optional*, defaults to 600): seconds to wait for an answer.
        retries (`int`, *optional*, defaults to 5): how often a request is sent again.
        backoff (`float`, *optional*, defaults to 1.0): seconds before the first of them; each wait is twice the last.

    Raises:
        `ValueError`: a bad URL or size, a key that the server refuses, or a model that it does not have.
        `OSError`: no answer from the server.
    """

    def __init__(
        self,
        url: str,
        tokenizer,
        stop_ids: set[int],
        model: str | None = None,
        max_new_tokens: int = 224,
        sampling: dict | None = None,
        seed: int = 0,
        chat_template_kwargs: dict | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        concurrency: int = 32,
        timeout: float = 600.0,
        retries: int = 5,
        backoff: float = 1.0,
    ):
        check_sizes(max_new_tokens=max_new_tokens, concurrency=concurrency)
        if timeout <= 0:
            raise ValueError(f"timeout must be above 0 seconds, got {timeout}.")
        check_chat_template(tokenizer)
        self.url, self.api_key_env, self._key = _base_url(url), api_key_env, os.environ.get(api_key_env)
        self.tokenizer, self.stop_ids, self.eos_token_id = tokenizer, stop_ids, tokenizer.eos_token_id
        self.seed, self.sampling, self.template_kwargs = seed, sampling, chat_template_kwargs or {}
        self.concurrency, self.timeout, self.retries, self.backoff = concurrency, timeout, retries, backoff
        self.max_new_tokens = max_new_tokens
        self.counts = Counter()
        self._ask_for_ids = True
        self._failed_in_a_row = 0
        self.model = self._find_model(model)

    def __call__(self, requests, shard: int, turn: int, tick: Callable[[int], None]) -> list[Answer | Failure]:
        return asyncio.run(self._answer_all(requests, turn, tick))

    async def _answer_all(self, requests, turn: int, tick: Callable[[int], None]) -> list[Answer | Failure]:
        gate = asyncio.Semaphore(self.concurrency)
        limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        async with httpx.AsyncClient(headers=self._headers(), timeout=self.timeout, limits=limits) as client:

            async def one(request_id: str, messages: list[dict]):
                async with gate:
                    answer = await self._answer(client, request_id, messages, turn)
                tick(len(answer.ids) if isinstance(answer, Answer) else 0)
                return answer

            tasks = [asyncio.ensure_future(one(*request)) for request in requests]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, client, request_id: str, messages: list[dict], turn: int) -> Answer | Failure:
        try:
            prompt_ids = render_prompt(self.tokenizer, messages, **self.template_kwargs)
        except Exception as error:  # a template raises what it likes, and jinja2 for it
            return Failure("chat template", str(error))
        result = await self._post(client, self._body(request_id, messages, turn))
        if isinstance(result, dict):
            result = self._read(result, prompt_ids)
        if isinstance(result, Failure) and result.again:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= 2 * self.concurrency:
                raise ServerGone(
                    f"{self.url} failed {self._failed_in_a_row} prompts in a row, each after {self.retries} more "
                    f"tries; the last: {result.detail}. What is written is kept; the same command goes on."
                )
        else:
            self._failed_in_a_row = 0
        return result

    def _body(self, request_id: str, messages: list[dict], turn: int) -> dict:
        body = {"model": self.model, "messages": messages, "max_tokens": self.max_new_tokens, "temperature": 0.0}
        if self.sampling is not None:
            digest = hashlib.sha256(f"{self.seed} {turn} {request_id}".encode()).digest()
            body |= {"temperature": self.sampling["temperature"], "top_p": self.sampling["top_p"]}
            body |= {"top_k": self.sampling["top_k"]} if self.sampling["top_k"] else {}
            body["seed"] = int.from_bytes(digest[:4], "little") >> 1
        if self.template_kwargs:
            body["chat_template_kwargs"] = self.template_kwargs
        if self._ask_for_ids:
            body["return_token_ids"] = True
        return body

    async def _post(self, client, body: dict) -> dict | Failure:
        """The server's JSON; or why there is none."""
        trouble, wait = "", self.backoff
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(min(wait, _MAX_WAIT_SECONDS))
                wait *= 2
            try:
                response = await client.post(f"{self.url}/chat/completions", json=body)
                if response.status_code == 200:
                    return _checked(response.json())
            except (httpx.TransportError, httpx.DecodingError, ValueError) as error:
                trouble = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                continue
            said = self._said(response)
            if response.status_code in _BUSY:
                trouble = f"HTTP {response.status_code}: {said}"
                wait = max(wait, _seconds(response.headers.get("retry-after")))
            elif response.status_code in (400, 422) and "return_token_ids" in body and "return_token_ids" in said:
                self._ask_for_ids = False
                return await self._post(client, {k: v for k, v in body.items() if k != "return_token_ids"})
            else:
                return self._refused(response.status_code, said)
        return Failure("server", self._hidden(trouble), again=True)

    def _refused(self, status: int, said: str) -> Failure:
        if status in (401, 403):
            raise ValueError(self._bad_key(status, said))
        if status == 404:
            raise ValueError(
                f"{self.url} has no model {self.model!r}, or no /chat/completions (HTTP 404: {said}). Name the model "
                "by --model, as the server was started with it."
            )
        long = any(words in said.lower() for words in ("context length", "too long", "maximum", "exceed"))
        return Failure("too long" if long else "refused by the server", f"HTTP {status}: {said}")

    def _read(self, result: dict, prompt_ids: list[int]) -> Answer | Failure:
        choice = result["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
        if finish not in ("stop", "length"):
            return Failure("finish reason", f"the server ended the answer with {finish!r}")
        self._check_prompt(result, prompt_ids)
        text, ids = message.get("content") or "", choice.get("token_ids")
        if ids is not None:
            self.counts["with_token_ids"] += 1
            if max(ids, default=0) >= len(self.tokenizer):
                raise ValueError(self._other_tokenizer(f"the server wrote token {max(ids)}"))
            answer = to_answer(ids, self.tokenizer, self.stop_ids)
            # Some servers leave the end token out.
            return Answer(answer.ids, answer.text, self._template_end()) if _unended(answer, finish) else answer
        if message.get("reasoning_content") or message.get("reasoning"):
            return Failure(
                "reasoning", "the server takes the reasoning out of the text; start it without a reasoning parser"
            )
        self.counts["retokenized"] += 1
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.tokenizer.decode(ids) != text:
            return Failure("no round trip", "the text does not decode to itself after tokenising")
        written = (result.get("usage") or {}).get("completion_tokens")
        # With or without the end token, as servers differ.
        if isinstance(written, int) and written - len(ids) not in (0, 1):
            self.counts["retokenized_otherwise"] += 1
        return Answer(ids, text, self._template_end() if finish == "stop" else None)

    def _check_prompt(self, result: dict, prompt_ids: list[int]):
        theirs = result.get("prompt_token_ids")
        if theirs is not None and list(theirs) != prompt_ids:
            raise ValueError(self._other_tokenizer(f"prompts of {len(theirs)} tokens there, {len(prompt_ids)} here"))
        counted = (result.get("usage") or {}).get("prompt_tokens")
        if theirs is None and isinstance(counted, int) and counted != len(prompt_ids):
            self.counts["prompt_length_differs"] += 1

    def _other_tokenizer(self, what: str) -> str:
        return (
            f"{self.url} has another tokenizer or chat template than {self.tokenizer.name_or_path!r} ({what}). Give "
            "the --target that the server runs, and start the server with its own chat template."
        )

    def _template_end(self) -> int:
        """The token that the template ends an answer with, which is what a target of several end tokens writes."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Zyxw"}]
        whole = self.tokenizer.apply_chat_template(messages, tokenize=False, **self.template_kwargs)
        after = self.tokenizer(whole.rpartition("Zyxw")[2], add_special_tokens=False)["input_ids"]
        return after[0] if after and after[0] in self.stop_ids else self.eos_token_id

    def _find_model(self, model: str | None) -> str:
        """Asks for the list of models, so that a wrong address, key or name is found out before the first prompt."""
        try:
            with httpx.Client(headers=self._headers(), timeout=min(self.timeout, 30.0)) as client:
                response = client.get(f"{self.url}/models")
        except httpx.InvalidURL as error:
            raise ValueError(f"--endpoint {self.url}: {error}.") from None
        except httpx.TransportError as error:
            raise OSError(f"{self.url} does not answer ({type(error).__name__}: {error}). Is the server up?") from None
        if response.status_code in (401, 403):
            raise ValueError(self._bad_key(response.status_code, self._said(response)))
        try:
            names = [entry["id"] for entry in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            if model is not None:
                return model  # some proxies have no list
            raise ValueError(
                f"{self.url}/models gives no list of models (HTTP {response.status_code}). Check --endpoint, or name "
                "the model by --model."
            ) from None
        if model is None and len(names) == 1:
            return names[0]
        if model not in names:
            asked = "several models" if model is None else f"no model {model!r}"
            raise ValueError(f"{self.url} has {asked}; there are {', '.join(map(repr, names))}. Name one by --model.")
        return model

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def _bad_key(self, status: int, said: str) -> str:
        what = "refuses the API key" if self._key else "wants an API key"
        return f"{self.url} {what} (HTTP {status}: {said}). Put it into the environment variable {self.api_key_env}."

    def _said(self, response) -> str:
        try:
            body = response.json()
            said = body.get("message") or body["error"]["message"]
        except (ValueError, KeyError, TypeError, AttributeError):
            said = response.text
        return self._hidden(" ".join(str(said).split()))[:_SHOWN_CHARACTERS]

    def _hidden(self, text: str) -> str:
        """Some servers repeat the key they refuse."""
        return text.replace(self._key, "***") if self._key else text


def _unended(answer: Answer, finish: str) -> bool:
    return finish == "stop" and answer.end_id is None


def _base_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--endpoint must be a URL such as http://localhost:8000/v1, got {url!r}.")
    if parts.username or parts.password or parts.query:
        raise ValueError("--endpoint must hold neither a password nor a query; put the key into the environment.")
    base = url.rstrip("/").removesuffix("/chat/completions")
    return base if urlsplit(base).path else f"{base}/v1"


def _checked(result) -> dict:
    """Raises `ValueError` for JSON that is no chat completion."""
    try:
        choice = result["choices"][0]
        content, ids = choice["message"].get("content"), choice.get("token_ids")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ValueError("the JSON is no chat completion") from None
    if not isinstance(content, (str, type(None))) or not isinstance(ids, (list, type(None))):
        raise ValueError("the JSON is no chat completion")
    return result


def _seconds(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0  # a date, which nobody sends here
