"""`vcsd model convert`: a folder that `--model` accepts, or a one-line error.

partner of: vcsd_cli/model.py
"""

import json

from tests.vcsd_cli.test_main import vcsd


def test_converted_llama2c_model_decodes(capsys, monkeypatch, data_dir, tmp_path):
    file, tokenizer = (str(data_dir / "stories260K" / name) for name in ("stories260K.bin", "tok512.bin"))
    out = tmp_path / "out"
    converts = ("model", "convert", file, str(out), "--tokenizer", tokenizer)
    code, said, _ = vcsd(capsys, monkeypatch, *converts, "-o", "json")
    assert (code, json.loads(said)["layers"]) == (0, 5)
    words = ("run", "--model", str(out), "--prompt", "Tom had", "--max-new-tokens", "4", "--method", "dense")
    code, said, _ = vcsd(capsys, monkeypatch, *words, "-o", "json")
    assert json.loads(said)["agreement"]["tokens_equal"]
    code, said, err = vcsd(capsys, monkeypatch, *converts)
    assert (code, said) == (1, "")
    assert "exists already" in err


def test_folder_that_exists_is_left_as_it_is(capsys, monkeypatch, tmp_path):
    written = list[object]()
    monkeypatch.setattr("vcsd_eval.model.llama2c.convert_model", lambda *files: written.append(files) or {"layers": 5})
    words = ("model", "convert", "a.bin", "--tokenizer", "b.bin")
    code, said, _ = vcsd(capsys, monkeypatch, *words, str(tmp_path / "new"), "-o", "json")
    assert (code, json.loads(said)["layers"], len(written)) == (0, 5, 1)
    code, said, _ = vcsd(capsys, monkeypatch, *words, str(tmp_path))
    assert (code, said, len(written)) == (1, "", 1)
