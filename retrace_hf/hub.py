"""What a drafter's folder holds besides weights and config, so that it runs where this package is not installed.

`AutoModel.from_pretrained(folder, trust_remote_code=True)` reads the flat modules that `auto_map` in config.json
names, `target.generate(..., custom_generate=folder, trust_remote_code=True)` reads `custom_generate/generate.py`.
"""

import inspect
import os
import shutil
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files

from .files import written_whole
from .folder_generate import generate


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


__all__ = ["AUTO_MAP", "code_files", "write_code"]
