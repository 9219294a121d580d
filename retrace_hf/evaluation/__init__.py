"""Measuring drafters: acceptance over known text without `generate()`, and with it."""

from ..generation import AcceptanceStats
from .equality import first_difference
from .kept import KeptLines
from .metrics import metric_path
from .results import bootstrap_ratio, summarize, write_results
from .rollout import roll_out


__all__ = [
    "AcceptanceStats",
    "KeptLines",
    "bootstrap_ratio",
    "first_difference",
    "metric_path",
    "roll_out",
    "summarize",
    "write_results",
]
