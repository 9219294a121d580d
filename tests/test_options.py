"""Every option of `generate()`, by the rows of `option_table.py`, with each kind of drafter; none is left out."""

import copy
import inspect
import re
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, StoppingCriteriaList
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from .fixtures import KINDS, tiny_target
from .option_table import (
    ARGUMENT_ROWS,
    CONFIG_ROWS,
    INPUT_ROWS,
    ROWS,
    Bench,
    Recorder,
    call,
    differences,
    equal,
    law,
    main,
    refused,
    rows_for,
    run_row,
)


@pytest.fixture(scope="module")
def benches():
    """A bench a family, made when it is first asked for."""
    return {}


def check(benches, family, row, kind):
    if family not in benches:
        benches[family] = Bench(family)
    result = run_row(benches[family], row, kind)
    assert not result.faults, f"{row} with a drafter that is {kind}: " + "; ".join(result.faults[:5])


# A random drafter accepts as little as one that is always wrong.
QUICK_KINDS = [pytest.param(kind, marks=pytest.mark.slow) if kind == "real" else kind for kind in KINDS]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", QUICK_KINDS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_an_option_is_served_as_plain_or_refused(benches, row, kind, deprecations_allowed):
    check(benches, "qwen3", row, kind)


def on_other_families() -> list[tuple]:
    return [(family, row) for family in ("llama", "gemma2") for row in rows_for(family)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("family", "row"), on_other_families(), ids=str)
def test_an_option_is_served_on_other_families(benches, family, row, kind, deprecations_allowed):
    check(benches, family, row, kind)


# -- no option without a row ------------------------------------------------------------------------------------------


def assert_same_names(rows, names, where, rows_name):
    tested = {row.option for row in rows}
    untested, gone = sorted(names - tested), sorted(tested - names)
    assert not untested, (
        f"No row tries {', '.join(untested)} of {where}. Add one to {rows_name} in tests/option_table.py: `equal` to "
        "plain or its `law`, `refused` with a message, or `inert` with a reason."
    )
    assert not gone, f"{where} has no {', '.join(gone)}; take the rows out of {rows_name} in tests/option_table.py."


def test_every_field_of_the_generation_config_has_a_row():
    names = {name for name in GenerationConfig().to_dict() if not name.startswith("_")}
    assert_same_names(CONFIG_ROWS, names, "GenerationConfig", "CONFIG_ROWS")


def test_every_argument_of_generate_has_a_row():
    # What the decoding loop takes beside its inputs comes out of generate()'s **kwargs.
    names = {*inspect.signature(GenerationMixin.generate).parameters}
    names |= {*inspect.signature(GenerationMixin._assisted_decoding).parameters}
    names -= {"self", "kwargs", "model_kwargs", "input_ids", "inputs_tensor"}
    assert_same_names(ARGUMENT_ROWS, names, "generate()", "ARGUMENT_ROWS")


def test_every_input_of_the_target_has_a_row():
    names = {*inspect.signature(tiny_target().forward).parameters}
    names -= {"kwargs", *GenerationConfig().to_dict()}
    # Beside them: the cache's old name, and names that no target knows.
    rows = [row for row in INPUT_ROWS if row.option not in ("past_key_values", "num_logits_to_keep", "max_new_token")]
    assert_same_names(rows, names, "the target's forward", "INPUT_ROWS")


def test_every_cache_implementation_has_a_row():
    tested = {row.value for row in CONFIG_ROWS if row.option == "cache_implementation"}
    untested = {*ALL_CACHE_IMPLEMENTATIONS, "paged"} - tested
    assert not untested, f"No row in CONFIG_ROWS of tests/option_table.py tries the caches {sorted(untested)}."


def test_a_new_option_is_named(monkeypatch):
    to_dict = GenerationConfig.to_dict
    monkeypatch.setattr(GenerationConfig, "to_dict", lambda self: {**to_dict(self), "top_z": None})
    with pytest.raises(
        AssertionError, match="No row tries top_z of GenerationConfig.*CONFIG_ROWS in tests/option_tab"
    ):
        test_every_field_of_the_generation_config_has_a_row()


# -- the table finds what it is there to find -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench():
    return Bench()


def swapped(outcome, **changes):
    """The outcome with some of its output replaced."""
    return replace(outcome, output=type(outcome.output)({**outcome.output, **changes}))


def test_any_part_of_the_output_that_differs_is_found(bench):
    (row,) = equal("max_new_tokens", 4)
    plain = call(bench, row)
    assert differences(plain, plain) == []
    out = plain.output
    scores = [*out.scores[:-1], out.scores[-1] + 0.1]
    states = out.hidden_states[:-1] + (tuple(state[..., :-1] for state in out.hidden_states[-1]),)
    for change, message in (
        ({"sequences": out.sequences.flip(1)}, "sequences"),
        ({"scores": out.scores[:-1]}, "scores has 3 parts, plain 4"),
        ({"scores": tuple(scores)}, r"scores\[3\] is off by 0.1"),
        ({"logits": None}, "logits is a NoneType"),
        ({"hidden_states": states}, r"hidden_states\[3\]\[0\] has shape \[1, 1, 31\], plain \[1, 1, 32\]"),
    ):
        found = differences(swapped(plain, **change), plain)
        assert found and re.search(message, found[0]), (found, message)
    cut = Recorder()
    cut.prompt, cut.tokens = plain.streamer.prompt, plain.streamer.tokens[:-1]
    assert differences(replace(plain, streamer=cut), plain) == ["streamer tokens", "streamer ended"]
    longer = copy.deepcopy(out.cache)
    longer.update(*(torch.ones(1, 2, 1, 8) for _ in range(2)), layer_idx=0)
    assert differences(swapped(plain, cache=longer), plain) == ["cache holds 24 tokens, plain 23"]


def test_another_law_is_found(bench, monkeypatch):
    """A drafter whose call drops a processor draws other tokens from the same noise."""
    (row,) = law("top_k", 2)
    assert run_row(bench, row, "mixed").word == "equal"
    real = GenerationMixin._assisted_decoding

    def without_processors(self, *args, logits_processor, **kwargs):
        return real(self, *args, logits_processor=type(logits_processor)(), **kwargs)

    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", without_processors)
    assert run_row(bench, row, "mixed").word == "DIFFERS"


def test_what_is_refused_late_or_otherwise_is_found(bench):
    (row,) = refused("num_beams", 2, "num_beams", streamer=None)
    assert run_row(bench, row, "real").word == "refused"
    (row,) = refused("num_beams", 2, "something else", streamer=None)
    assert "refused with ValueError: num_beams is 2" in run_row(bench, row, "real").faults[0]
    (row,) = refused("max_new_tokens", 3, "")
    assert run_row(bench, row, "real").faults == ["was not refused"]

    class Late:
        def __call__(self, input_ids, scores, **kwargs):
            raise ValueError("late")

    (row,) = refused("stopping_criteria", StoppingCriteriaList([Late()]), "late")
    assert run_row(bench, row, "real").faults == ["refused after 1 passes of the target"]


def test_the_command_prints_the_table(capsys, monkeypatch):
    assert main(["--option", "disable_compile"]) == 0
    out = capsys.readouterr().out
    assert "disable_compile" in out and "equal 10 (0)" in out and "DIFFERS" not in out
    monkeypatch.setattr("tests.option_table.differences", lambda *_: ["another text"])
    assert main(["--option", "disable_compile"]) == 1
    assert "qwen3, wrong, disable_compile=True: another text" in capsys.readouterr().out
