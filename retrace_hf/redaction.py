"""Keeping tokens and keys out of what is written down for others."""

import re


# The options that carry one: --hub_token, --push-to-hub-token, --token, --api_key. Not --mask_token, --num_tokens.
_OPTION = re.compile(
    r"(--(?:hub[-_]|push[-_]to[-_]hub[-_]|hf[-_])?(?:token|api[-_]key)(?:=|\s+))(\\?\"[^\"]*\"|'[^']*'|[^\s\"'\\]+)"
)
_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}\b")
_IN_URL = re.compile(r"(https?://)[^/\s@\"'\\]+@")


def redacted(text: str) -> str:
    """The text with access tokens, API keys and passwords in URLs replaced by `***`."""
    text = _OPTION.sub(r"\1***", text)
    return _IN_URL.sub(r"\1***@", _TOKEN.sub("***", text))


__all__ = ["redacted"]
