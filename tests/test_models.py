"""A model by name or from a directory: the right weights, tokenizer and type, or one line that says why not."""

from __future__ import annotations

import json
import shutil

import pytest
import tiny
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from wakekv.errors import InputError, ModelError
from wakekv.recording import fetch, models


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with a tiny random llama, stored in bfloat16, and a tokenizer of 64 words."""
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    tiny.model("llama").to(torch.bfloat16).save_pretrained(folder)
    words = WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


@pytest.mark.model
def test_the_default_model_knows_the_capital_of_france(smol):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = smol.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        out = smol.model.generate(**ids, max_new_tokens=12, do_sample=False)
    answer = smol.tokenizer.decode(out[0, ids.input_ids.shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.model
def test_the_default_model_is_what_its_file_says(smol):
    config = smol.model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert config.max_position_embeddings == smol.context == 8192 and config._attn_implementation == "sdpa"
    assert sum(p.numel() for p in smol.model.parameters()) == models.MODELS["smollm2-135m"].parameters
    assert not smol.model.training and getattr(config, "quantization_config", None) is None
    folder = models.fetch("smollm2-135m")
    assert smol.source["sha256"] == models.weights_sha256(folder) and smol.source["licence"] == "Apache-2.0"
    assert {path.name for path in folder.iterdir()} >= {"model.safetensors", "source.json", "tokenizer.json"}
    assert not list(folder.glob("*.gguf"))


@pytest.mark.model
def test_the_default_tokenizer_gives_back_what_it_is_given(smol):
    text = "Two  spaces, a\ttab,\n\nlines, 12345, déjà vu, 日本 and $x^2$."
    assert smol.tokenizer.decode(smol.tokenizer(text, add_special_tokens=False).input_ids) == text
    assert len(smol.tokenizer("12345", add_special_tokens=False).input_ids) == 5  # one token a digit
    assert smol.tokenizer.eos_token == "<|im_end|>"


@pytest.mark.model
def test_weights_that_changed_in_the_cache_are_refused(smol, tmp_path, monkeypatch):
    kept = models.fetch("smollm2-135m")
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "source.json").write_bytes((kept / "source.json").read_bytes())
    with open(kept / "model.safetensors", "rb") as whole:
        (tmp_path / "smollm2-135m" / "model.safetensors").write_bytes(whole.read(1000))
    monkeypatch.setenv("WAKEKV_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="have changed"):
        models.load("smollm2-135m")


def test_a_local_directory_is_loaded_in_float32_on_a_cpu_and_says_so(saved, caplog, monkeypatch):
    monkeypatch.setattr(models, "_has_bf16", lambda device: True)
    found = models.load(saved, device="cpu")
    assert found.name == "tiny" and {p.dtype for p in found.model.parameters()} == {torch.float32}
    assert found.source["sha256"] == fetch.sha256(saved / "model.safetensors")
    assert "stored as bfloat16, loaded as float32" in caplog.text


def test_a_directory_named_like_a_known_model_is_taken_as_it_is(saved, tmp_path):
    twin = shutil.copytree(saved, tmp_path / "smollm2-135m")
    assert models.load(twin, device="cpu").source["source"] == "local directory"


def test_bfloat16_without_the_hardware_becomes_float32_and_says_why(saved, caplog, monkeypatch):
    monkeypatch.setattr(models, "_has_bf16", lambda device: False)
    for asked in ("auto", "bfloat16"):
        caplog.clear()
        assert models.load(saved, dtype=asked, device="cpu").model.dtype == torch.float32
        assert "no bfloat16 on this cpu" in caplog.text and len(caplog.records) == 1
    monkeypatch.setattr(models, "_has_bf16", lambda device: True)
    assert models.load(saved, dtype="bfloat16", device="cpu").model.dtype == torch.bfloat16


def test_float16_that_overflows_becomes_float32_and_says_why(saved, copy, caplog):
    assert models.load(saved, dtype="float16", device="cpu").model.dtype == torch.float16
    assert not caplog.text
    model = tiny.model("llama")
    model.model.norm.weight.data.fill_(1e4)  # logits of some hundred thousand: fine in bfloat16, infinite in float16
    model.lm_head.weight.data.fill_(1.0)
    model.save_pretrained(copy)
    caplog.clear()
    found = models.load(copy, dtype="float16", device="cpu")
    assert found.model.dtype == torch.float32 and "float16 overflows" in caplog.text
    assert torch.isfinite(found.model(torch.tensor([[1, 2, 3]])).logits).all()


def test_several_files_of_weights_have_one_hash(tmp_path):
    (tmp_path / "b.safetensors").write_bytes(b"two")
    alone = models.weights_sha256(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"one")
    both = models.weights_sha256(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"One")
    assert (
        alone == fetch.sha256(tmp_path / "b.safetensors") and len({alone, both, models.weights_sha256(tmp_path)}) == 3
    )


def damage(folder, how):
    config, weights = folder / "config.json", folder / "model.safetensors"
    if how == "no config":
        config.unlink()
    elif how == "no weights":
        weights.unlink()
    elif how == "half the weights":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif how == "one layer more than weights":
        config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 4}))
    elif how == "no tokenizer":
        for path in folder.glob("*token*"):
            path.unlink()
    elif how == "not a decoder":
        config.write_text(json.dumps({"model_type": "vit"}))


@pytest.mark.parametrize(
    "how, said",
    [
        ("no config", "no config.json"),
        ("no weights", "no .*safetensors"),
        ("half the weights", "cannot load"),
        ("one layer more than weights", "lacks weights, model.layers.3"),
        ("no tokenizer", "cannot load"),
        ("not a decoder", "cannot load"),
    ],
)
def test_a_damaged_directory_is_one_line(copy, how, said):
    damage(copy, how)
    with pytest.raises(ModelError, match=said) as error:
        models.load(copy, device="cpu")
    assert str(copy) in str(error.value) and "\n" not in str(error.value)


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        models.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "given, said",
    [
        ({"name_or_dir": "smollm"}, "unknown model 'smollm': did you mean smollm2-135m"),
        ({"name_or_dir": "smollm2-135m", "dtype": "float8"}, "unknown dtype"),
        ({"name_or_dir": "smollm2-135m", "device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
        ({"name_or_dir": "smollm2-135m", "device": "toaster"}, "device 'toaster' cannot be used here"),
    ],
)
def test_a_wrong_name_type_or_device_is_one_line(given, said):
    with pytest.raises(InputError, match=said) as error:
        models.load(**given)
    assert "\n" not in str(error.value)


def test_a_hub_model_without_the_hub_says_what_to_do(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="Qwen/Qwen2.5-3B-Instruct.*local directory.*smollm2-135m") as error:
        models.fetch("qwen2.5-3b")
    assert "\n" not in str(error.value)


def test_the_table_says_what_each_model_is(monkeypatch, tmp_path):
    monkeypatch.setenv("WAKEKV_CACHE", str(tmp_path))
    rows = {row["name"]: row for row in models.describe()}
    assert list(rows) == list(models.MODELS) and not rows["smollm2-135m"]["cached"]
    assert "Gemma Terms" in rows["gemma3-270m"]["licence"] and "hub" in rows["mistral-7b"]["source"]
    (tmp_path / "smollm2-135m").mkdir()
    assert {row["name"]: row["cached"] for row in models.describe()}["smollm2-135m"]


def test_every_source_is_either_packages_with_members_or_the_hub():
    for source in models.MODELS.values():
        assert bool(source.hub) != bool(source.packages) and len(source.packages) == len(source.members)
        assert all(len(package.sha256) == 64 for package in source.packages)


@pytest.mark.model
def test_gemma_keeps_its_windows_and_its_first_token():
    """Only where it has been fetched: a quarter of a gigabyte, under terms that a reader should accept first."""
    if not (fetch.cache() / "gemma3-270m").is_dir():
        pytest.skip("gemma3-270m is not in the cache: python -m wakekv models --fetch gemma3-270m")
    folder = models.fetch("gemma3-270m")
    config = json.loads((folder / "config.json").read_text())
    assert config["layer_types"] == (["sliding_attention"] * 5 + ["full_attention"]) * 3
    assert config["sliding_window"] == 512
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("Paris").ids
    assert ids[0] == config["bos_token_id"] and len(ids) == 2
