"""What a drafter's folder holds besides weights and config: the code with which it runs where this package is not
installed, and its card.

`AutoModel.from_pretrained(folder, trust_remote_code=True)` reads the flat modules that `auto_map` in config.json
names, `target.generate(..., custom_generate=folder, trust_remote_code=True)` reads `custom_generate/generate.py`.
"""

import inspect
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from safetensors import safe_open
from transformers.dynamic_module_utils import get_relative_import_files

from .card import CARD, is_rendered, write_card
from .files import write_text, written_whole
from .folder_generate import generate
from .redaction import redacted


AUTO_MAP = {"AutoConfig": "configuration_retrace.RetraceConfig", "AutoModel": "modeling_retrace.RetraceDrafter"}


def code_files() -> dict[str, Path]:
    """The files of code by their path in a drafter's folder: the model's module, all that it imports relatively (found
    as transformers finds it when it loads them), and the generate function."""
    modeling = Path(__file__).with_name("modeling_retrace.py")
    modules = [modeling, *map(Path, get_relative_import_files(modeling))]
    return {module.name: module for module in modules} | {
        "custom_generate/generate.py": Path(inspect.getfile(generate))
    }


def write_code(folder: str | os.PathLike) -> None:
    """Writes the code into a drafter's folder, each file whole or not at all."""
    for name, source in code_files().items():
        with written_whole(Path(folder, name)) as temporary:
            shutil.copyfile(source, temporary)


# -- the card --------------------------------------------------------------------------------------------------------

# Of the card that transformers makes up where a repository has none.
_STUB = "This is the model card of a 🤗 transformers model that has been pushed on the Hub."


def read_card(folder: str | os.PathLike) -> str | None:
    """The text of a folder's card, if it has one."""
    path = Path(folder, CARD)
    return path.read_text(encoding="utf-8") if path.is_file() else None


def read_hub_card(repo_id: str | None, token: str | None = None) -> str | None:
    """The text of a repository's card on the Hub; `None` where there is none, or no Hub."""
    if repo_id is None:
        return None
    try:
        return ModelCard.load(repo_id, token=token, ignore_metadata_errors=True).content
    except (HfHubHTTPError, HFValidationError, OSError):
        return None


def is_own(card: str | None) -> bool:
    """Whether somebody wrote this card himself, so that it has to stay."""
    return bool(card and card.strip()) and not is_rendered(card) and _STUB not in card


def complete_folder(folder: str | os.PathLike, drafter, repo_id: str, card_before: str | None = None) -> None:
    """Adds to a folder that is about to be uploaded what else belongs to the drafter: the code, and the card.

    A card that somebody wrote stays: the folder's, else that of the folder it was loaded from, else the Hub's. Any
    other is rendered from what is known. A drafter that still is as it was loaded brings its results along.

    Args:
        folder (`str` or `os.PathLike`):
            As transformers leaves it: weights, config, and the card of the Hub's repository or one made up.
        drafter ([`RetraceDrafter`]): What is uploaded.
        repo_id (`str`): Where to.
        card_before (`str`, *optional*): The card that was in the folder before transformers wrote its own.
    """
    folder = Path(folder)
    write_code(folder)
    if not (folder / "config.json").is_file():  # an adapter: its card is its base's affair
        return
    hub_card, cards = read_card(folder), [card_before]
    source = unchanged_source(drafter)
    if source is not None and source.resolve() != folder.resolve():
        _bring_along(source, folder)
        cards.append(read_card(source))
    cards = [card for card in [*cards, hub_card] if card]
    own = next(filter(is_own, cards), None)
    if cards:  # one that was rendered still knows licence and base model
        write_text(folder / CARD, own or cards[0])
    if own is None:
        write_card(folder, overwrite=True, repo_id=repo_id, tags=hub_card and ModelCard(hub_card).data.tags)


def unchanged_source(drafter) -> Path | None:
    """The folder that a drafter was loaded from, if its weights and config are still what the files there say."""
    source = Path(drafter.name_or_path or "")
    weights = source / "model.safetensors"
    if not (drafter.name_or_path and weights.is_file() and (source / "config.json").is_file()):
        return None
    passing = {"dtype", "auto_map", "architectures", "transformers_version", "_name_or_path"}
    ours, theirs = (
        {name: value for name, value in config.to_dict().items() if name not in passing}
        for config in (drafter.config, type(drafter.config).from_pretrained(source))
    )
    return source if ours == theirs and _same_weights(weights, drafter.state_dict()) else None


def _same_weights(file: Path, state: dict[str, torch.Tensor]) -> bool:
    if any(weight.is_meta for weight in state.values()):  # offloaded: not looked at
        return False
    with safe_open(file, "pt") as stored:
        return set(stored.keys()) == set(state) and all(
            torch.equal(stored.get_tensor(name).to(weight.dtype), weight.detach().cpu())
            for name, weight in state.items()
        )


def _bring_along(source: Path, folder: Path) -> None:
    """What was measured is what is published: the notes, and the weights as they are stored, unless those are larger:
    then the drafter was moved to half precision to be published in it."""
    for name in ("results.json", "training.json"):
        if (source / name).is_file() and not (folder / name).is_file():
            write_text(folder / name, redacted((source / name).read_text(encoding="utf-8")))
    stored, saved = source / "model.safetensors", folder / "model.safetensors"
    if saved.is_file() and stored.stat().st_size <= saved.stat().st_size:
        with written_whole(saved) as temporary:
            shutil.copyfile(stored, temporary)


# -- errors ----------------------------------------------------------------------------------------------------------


@contextmanager
def plain_hub_errors(repo_id: str | os.PathLike) -> Iterator[None]:
    """What the Hub answers to a write, as one line that says what to do.

    Raises:
        PermissionError: there is no token, it is not known, or it may not write there.
        FileNotFoundError: there is no such repository or revision.
    """
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise PermissionError(_NO_TOKEN.format(repo_id)) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            sent = "authorization" in error.response.request.headers
            raise PermissionError((_BAD_TOKEN if sent else _NO_TOKEN).format(repo_id)) from error
        if status == 403:
            said = redacted(error.response.headers.get("X-Error-Message") or "it is another's, or is only for reading")
            raise PermissionError(_FORBIDDEN.format(repo_id, said.rstrip("."))) from error
        if status == 404:
            raise FileNotFoundError(_NOT_FOUND.format(repo_id, type(error).__name__)) from error
        raise


_NO_TOKEN = "The Hub takes nothing for {} without a token: run `hf auth login`, or set HF_TOKEN, and push again."
_BAD_TOKEN = "The Hub does not know the token that was sent for {}: run `hf auth login` with one that is valid."
_FORBIDDEN = (
    "The token may not write to {} ({}): push to a repository of your own, use a token with write access, or pass "
    "create_pr=True to propose the change."
)
_NOT_FOUND = "The Hub has no {} to push to, or not that revision of it, or the token may not see it ({})."


__all__ = ["AUTO_MAP", "code_files", "complete_folder", "plain_hub_errors", "read_card", "read_hub_card", "write_code"]
