"""Loading: each thing that can be wrong with a model gets its one line."""

import json
import shutil
import sys

import pytest
import torch

from scaledot import ScaledotError
from scaledot.loading import SAMPLE, load, sample_text


@pytest.fixture
def folder(tmp_path):
    """A copy of the embedded sample that a test may spoil."""
    return shutil.copytree(SAMPLE, tmp_path / "mini")


def error(*args, **options):
    with pytest.raises(ScaledotError) as caught:
        load(*args, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_sample_loads_without_network_or_noise(capfd):
    loaded = load()
    assert loaded.name == "embedded sample"
    assert not loaded.model.training
    assert next(loaded.model.parameters()).dtype == torch.float32
    assert loaded.notes == ()
    assert capfd.readouterr() == ("", "")


def test_dtype_is_what_was_asked():
    assert next(load(dtype="bfloat16").model.parameters()).dtype == torch.bfloat16


def test_the_sample_text_is_text():
    assert len(sample_text().split()) > 300


def test_missing_folder():
    assert error("modls/gpt2") == (
        "no model at 'modls/gpt2': no such folder, and not cached as a hub id"
    )
    assert error("./nowhere/at/all").startswith("no model at './nowhere/at/all': no such folder")


def test_truncated_weights(folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    assert error(str(folder)) == (
        f"weights cut short: model.safetensors has {len(data) // 2:,} of {len(data):,} bytes; "
        "fetch it again"
    )


@pytest.mark.parametrize("junk", [b"", b"hello", b"\xff" * 64])
def test_weights_that_are_no_safetensors(folder, junk):
    (folder / "model.safetensors").write_bytes(junk)
    assert error(str(folder)) == "model.safetensors is not a safetensors file; fetch it again"


def test_unknown_architecture(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "foo"}))
    assert error(str(folder)) == (
        "unknown architecture 'foo' in config.json; its own code stays off without "
        "--trust-remote-code, which runs it"
    )


def test_missing_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert error(str(folder)) == (
        "no tokenizer in 'mini': add tokenizer.json or pass --tokenizer FOLDER"
    )
    assert load(str(folder), tokenizer=str(SAMPLE)).tokenizer.vocab_size > 256


def test_a_pickle_is_refused_by_default(folder):
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert error(str(folder)) == (
        "pytorch_model.bin is a pickle and can run code: convert to safetensors, "
        "or --allow-pickle if you trust it"
    )
    assert load(str(folder), allow_pickle=True).model is not None


def test_missing_attention_weights_are_not_made_up(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    gone = [n for n in tensors if "h.1.attn.c_attn" in n]
    assert gone
    save_file({n: x for n, x in tensors.items() if n not in gone}, folder / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    assert "the model would attend at random" in error(str(folder))


def test_a_folder_that_is_no_model(tmp_path):
    assert (
        error(str(tmp_path)) == f"no config.json in '{tmp_path}': not a Hugging Face model folder"
    )


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    assert error(str(folder)) == f"no weights in '{folder}': model.safetensors is missing"


def test_a_file_that_is_no_model(folder):
    assert "is a file: pass the model's folder" in error(str(folder / "config.json"))


def test_gguf_that_is_none(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    assert error(str(tmp_path / "x.gguf")).startswith("cannot read x.gguf: not a whole GGUF file")
    assert error(str(tmp_path / "y.gguf")) == f"no file '{tmp_path / 'y.gguf'}'"


def test_unknown_device_and_dtype():
    assert error(device="gpu").startswith("no device 'gpu' here")
    assert error(dtype="int8") == (
        "unknown dtype 'int8': pass one of float32, bfloat16, float16, float64"
    )


def test_without_transformers_the_error_names_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert error() == 'transformers is not installed: pip install "scaledot[hf]"'
