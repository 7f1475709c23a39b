"""llama2.c models: the layout byte by byte, and real weights that continue their story with drives."""

import struct

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vcsd.config import AttachConfig
from vcsd.generate import agreement, continue_text
from vcsd.loading import encode
from vcsd_eval.model.llama2c import convert_model

SHAPE = (16, 24, 2, 4, 2, 300, 64)  # width, hidden, layers, heads, KV heads, vocabulary, context


def weights_of(shape, seed=0):
    width, hidden, layers, heads, kv_heads, vocabulary, context = shape
    kv, size, n = width * kv_heads // heads, abs(vocabulary), layers
    counts = (size * width, n * width, n * width * width, n * kv * width, n * kv * width, n * width * width, n * width)
    counts += (n * hidden * width, n * width * hidden, n * hidden * width, width, context * width // heads)
    counts += (size * width,) if vocabulary < 0 else ()
    draw = np.random.default_rng(seed)
    return [draw.normal(0, 0.3, count).astype(np.float32) for count in counts]


@pytest.fixture
def files(tmp_path):
    model, tokenizer = tmp_path / "model.bin", tmp_path / "tok.bin"

    def write(shape=SHAPE):
        model.write_bytes(struct.pack("<7i", *shape) + b"".join(part.tobytes() for part in weights_of(shape)))
        pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % n for n in range(256))]
        pieces += [b" ", b"a", b"b", b" a", b"ab", b" ab", *(b"%c" % (0x63 + n) for n in range(20))]
        pieces += [b"x%d" % n for n in range(300 - len(pieces))]
        entries = (struct.pack("<fi", -float(n), len(piece)) + piece for n, piece in enumerate(pieces))
        tokenizer.write_bytes(struct.pack("<i", 8) + b"".join(entries))
        return model, tokenizer

    return write


def forward(shape, parts, ids):
    """llama2.c's arithmetic for one token after another, with rotations of neighbouring channels."""
    width, hidden, layers, heads, kv_heads, vocabulary, _ = shape
    d, kv = width // heads, width * kv_heads // heads
    embed, norm1, wq, wk, wv, wo, norm2, w1, w2, w3, last = parts[:11]
    sizes = ((width, width), (kv, width), (kv, width), (width, width))
    q_, k_, v_, o_ = (w.reshape(layers, *s) for w, s in zip((wq, wk, wv, wo), sizes, strict=True))
    embed = embed.reshape(-1, width)

    def rms(x, weight):
        return weight * x / np.sqrt((x * x).mean() + 1e-5)

    def turn(x, position):
        pairs = x.reshape(-1, d // 2, 2)
        angle = position * 10000.0 ** (-2 * np.arange(d // 2) / d)
        cos, sin = np.cos(angle), np.sin(angle)
        real, imag = pairs[..., 0], pairs[..., 1]
        return np.stack([real * cos - imag * sin, real * sin + imag * cos], -1).reshape(-1, d)

    keys, values = ([[] for _ in range(layers)] for _ in range(2))
    for position, token in enumerate(ids):
        x = embed[token].astype(np.float64)
        for n in range(layers):
            h = rms(x, norm1.reshape(layers, width)[n])
            q, k, v = turn(q_[n] @ h, position), turn(k_[n] @ h, position), (v_[n] @ h).reshape(-1, d)
            keys[n].append(k)
            values[n].append(v)
            out = []
            for head in range(heads):
                group = head * kv_heads // heads
                logits = np.array([q[head] @ key[group] for key in keys[n]]) / np.sqrt(d)
                weights = np.exp(logits - logits.max())
                out.append(sum(w * value[group] for w, value in zip(weights, values[n], strict=True)) / weights.sum())
            x = x + o_[n] @ np.concatenate(out)
            h = rms(x, norm2.reshape(layers, width)[n])
            gate = w1.reshape(layers, hidden, width)[n] @ h
            x = x + w2.reshape(layers, width, hidden)[n] @ (
                gate / (1 + np.exp(-gate)) * (w3.reshape(layers, hidden, width)[n] @ h)
            )
    return (parts[12].reshape(-1, width) if vocabulary < 0 else embed) @ rms(x, last)


@pytest.mark.parametrize("vocabulary", [300, -300])
def test_a_converted_model_computes_the_same(files, tmp_path, vocabulary):
    shape = (*SHAPE[:5], vocabulary, SHAPE[6])
    converted = convert_model(*files(shape), tmp_path / "out")
    assert converted == {"layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 4}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = [7, 290, 3, 41, 41, 5]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1].numpy()
    np.testing.assert_allclose(logits, forward(shape, weights_of(shape), ids), atol=1e-4)


def test_converted_tokenizer_merges_and_byte_fallback(files, tmp_path):
    convert_model(*files(), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("ab\n")["input_ids"] == [1, 264, 13]
    assert tokenizer.decode(tokenizer("a b é\n")["input_ids"], skip_special_tokens=True) == "a b é\n"


def test_other_and_cut_files_are_refused(files, tmp_path):
    model, tokenizer = files()
    whole = model.read_bytes()
    for content, reason in (
        (whole[:-4], "cut off, or another version"),
        (whole[:10], "not a llama2.c model"),
        (b"\xff" * 28 + whole[28:], "must describe a valid model shape"),
    ):
        model.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            convert_model(model, tokenizer, tmp_path / "out")
    model.write_bytes(whole)
    tokenizer.write_bytes(tokenizer.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"tok\.bin: \d+ bytes, where 300 tokens"):
        convert_model(model, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_real_story_stays_the_same_in_drives(data_dir, tmp_path):
    folder = data_dir / "stories260K"
    convert_model(folder / "stories260K.bin", folder / "tok512.bin", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    inputs = encode(model, tokenizer, "Tom had a red ball.", 1, 120, 0)
    settings = [AttachConfig(method=method, compression=1, drives=2) for method in ("dense", "sparf")]
    dense, sparf = (continue_text(model, tokenizer, inputs, 120, setting) for setting in settings)
    assert agreement(model, inputs, 120, settings[0], dense).tokens_equal
    assert sparf.tokens == dense.tokens
    assert dense.text.startswith(" He ")
    assert "the ball" in dense.text
