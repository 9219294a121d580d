"""ReTrace: block-diffusion speculative decoding that also looks at what the target rejected in the round before.

Importing the package registers [`RetraceDrafter`] with the Auto classes and teaches `generate()` to use it:

```python
import retrace_hf

drafter = retrace_hf.RetraceDrafter.from_pretrained("org/retrace-qwen3-8b")
target.generate(**inputs, assistant_model=drafter)
```
"""

import sys
from typing import TYPE_CHECKING

from transformers import AutoConfig, AutoModel

from .candidate_generator import RetraceCandidateGenerator
from .configuration_retrace import RetraceConfig
from .generation import AcceptanceStats, install_generate_hook, record_acceptance
from .modeling_retrace import RetraceDrafter, RetracePreTrainedModel
from .streamers import OriginStreamer
from .trajectory import RejectedTrajectory, align_trajectory


if TYPE_CHECKING:
    from .data import RetraceDataCollator
    from .training import RetraceTrainer, RetraceTrainingArguments

__version__ = "0.1.0"

AutoConfig.register("retrace", RetraceConfig, exist_ok=True)
AutoModel.register(RetraceConfig, RetraceDrafter, exist_ok=True)  # the hook came with modeling_retrace
# pipeline(assistant_model=folder) looks up here the class that config.json names. Not `import transformers`: it puts
# another module in its own place while it is imported.
sys.modules["transformers"].RetraceDrafter = RetraceDrafter

# Training pulls in Trainer, accelerate and datasets; a user who only generates should not wait for them.
_LAZY = {
    "RetraceTrainer": "training",
    "RetraceTrainingArguments": "training",
    "RetraceDataCollator": "data",
}


def __getattr__(name: str):
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "AcceptanceStats",
    "OriginStreamer",
    "RejectedTrajectory",
    "RetraceCandidateGenerator",
    "RetraceConfig",
    "RetraceDataCollator",
    "RetraceDrafter",
    "RetracePreTrainedModel",
    "RetraceTrainer",
    "RetraceTrainingArguments",
    "align_trajectory",
    "install_generate_hook",
    "record_acceptance",
]
