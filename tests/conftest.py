"""Settings of every test: offline, seeded, few threads; what is missing is a failure, not a skip."""

import logging
import os


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402


# Tiny models gain nothing from many threads, and CI machines are shared.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or min(2, os.cpu_count() or 1)))

MISSING = ("could not import", "no module named", "not installed")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _fail_if_missing(report):
    """A test that skips itself because a package is missing tests nothing: `pip install -e .[test]` has them all."""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2])
        if any(words in reason.lower() for words in MISSING):
            report.outcome = "failed"
            report.longrepr = f"{reason}\nSkipping for a missing dependency is a failure; pip install -e '.[test]'."
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _fail_if_missing((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _fail_if_missing((yield))


class _DeprecationsFail(logging.Handler):
    """transformers also announces in its log what it will remove."""

    def emit(self, record):
        message = record.getMessage()
        if "deprecat" in message.lower():
            raise AssertionError(f"transformers logged a deprecation: {message}")


@pytest.fixture(autouse=True)
def deprecations_fail():
    handler = _DeprecationsFail(level=logging.WARNING)
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


@pytest.fixture
def deprecations_allowed(deprecations_fail):
    """For what is deprecated upstream but must go on working, and for what upstream itself still uses."""
    logger = logging.getLogger("transformers")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _DeprecationsFail)]:
        logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def seeded():
    transformers.set_seed(0)


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct and its tokenizer. The first time on a machine its weights are converted, some 25 s."""
    from retrace_hf.targets import load_target

    return load_target()
