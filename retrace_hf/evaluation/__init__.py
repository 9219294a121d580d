"""Measuring drafters: acceptance over known text without `generate()`, and with it."""

from ..generation import AcceptanceStats
from .kept import KeptLines
from .metrics import metric_path
from .results import bootstrap_ratio, summarize, write_results
from .rollout import roll_out


__all__ = ["AcceptanceStats", "KeptLines", "bootstrap_ratio", "metric_path", "roll_out", "summarize", "write_results"]
