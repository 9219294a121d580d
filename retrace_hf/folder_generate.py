"""`target.generate(**inputs, custom_generate="org/drafter", trust_remote_code=True)`: generates with that drafter.

This file stands in a drafter's folder as custom_generate/generate.py, alone: it imports nothing relatively.
"""

import inspect
import os
import threading
import weakref

from transformers import AutoModel


# How the folder was asked for; generate() itself knows none of them.
_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")

# By target, so that a drafter goes when its target goes.
_drafters = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def generate(model, assistant_model=None, **kwargs):
    """As `model.generate(assistant_model=drafter, **kwargs)` with this folder's drafter, loaded on the first call.

    Args:
        model (`PreTrainedModel`): The target.
        assistant_model (`PreTrainedModel`, *optional*): A drafter to use instead of the folder's.
        kwargs: As in `generate()`.

    Raises:
        ValueError: called by hand and without `assistant_model`, so that no folder is known.
    """
    options = {name: kwargs.pop(name) for name in _HUB_OPTIONS if name in kwargs}
    if assistant_model is None:
        # transformers copies this file elsewhere before it runs it and does not pass on where it came from; the
        # generate() that called knows.
        folder = inspect.currentframe().f_back.f_locals.get("custom_generate")
        if not isinstance(folder, str):
            raise ValueError(
                "The folder of the drafter is not known here; call target.generate(custom_generate=folder, "
                "trust_remote_code=True), or pass the drafter as assistant_model."
            )
        assistant_model = _drafter_of(model, folder, options)
    return model.generate(assistant_model=assistant_model, **kwargs)


def _drafter_of(model, folder: str, options: dict):
    changed = os.stat(os.path.join(folder, "config.json")).st_mtime_ns if os.path.isdir(folder) else None
    key = (folder, changed, *sorted((name, str(value)) for name, value in options.items()))
    with _lock:
        loaded = _drafters.setdefault(model, {})
        if key not in loaded:
            drafter = AutoModel.from_pretrained(folder, trust_remote_code=True, **options)
            # An offloaded target names meta as its device.
            loaded[key] = drafter if model.device.type == "meta" else drafter.to(model.device)
        return loaded[key]
