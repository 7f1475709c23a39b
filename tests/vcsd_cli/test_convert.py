"""`vcsd convert`: a folder that `--model` accepts, or a one-line error."""

import json

from tests.vcsd_cli.test_main import vcsd


def test_converted_llama2c_model_decodes(capsys, monkeypatch, data_dir, tmp_path):
    files = [str(data_dir / "stories260K" / name) for name in ("stories260K.bin", "tok512.bin")]
    out = tmp_path / "out"
    code, said, _ = vcsd(capsys, monkeypatch, "convert", "llama2c", *files, str(out), "-o", "json")
    assert (code, json.loads(said)["layers"]) == (0, 5)
    words = ("run", "--model", str(out), "--prompt", "Tom had", "--max-new-tokens", "4", "--method", "dense")
    code, said, _ = vcsd(capsys, monkeypatch, *words, "-o", "json")
    assert json.loads(said)["agreement"]["tokens_equal"]
    code, said, err = vcsd(capsys, monkeypatch, "convert", "llama2c", *files, str(out))
    assert (code, said) == (1, "")
    assert "exists already" in err
