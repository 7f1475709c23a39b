"""Texts by name, each from its file as published.

partner of: eval/accuracy/data.py
"""

import json
from pathlib import Path

import pytest

from vcsd_eval.accuracy import texts


def test_text_names_are_read_from_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("VCSD_DATA", str(tmp_path))
    (tmp_path / "wiki.test.raw").write_text("a wiki")
    squad = {"data": [{"title": "t", "paragraphs": [{"context": "one", "qas": []}, {"context": "two", "qas": []}]}]}
    (tmp_path / "dev-v1.1.json").write_text(json.dumps(squad))
    said = [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}]
    (tmp_path / "sharegpt_sample.json").write_text(json.dumps(said))
    assert texts.read(Path("wikitext")) == "a wiki"
    assert texts.read(Path("squad")) == "one\n\ntwo"
    assert texts.read(Path("sharegpt")) == "human: hi\n\ngpt: ho"
    assert texts.read(None).startswith("First Citizen")
    assert len(texts.read(Path("code"))) >= texts.CODE_CHARS
    with pytest.raises(ValueError, match="text shakespeare: set VCSD_DATA to a folder that has tinyshakespeare"):
        texts.read(Path("shakespeare"))


@pytest.mark.parametrize("written", ["no json", "[]", '{"data": 1}', '{"data": [{"paragraphs": [{}]}]}'])
def test_data_file_of_wrong_format_is_named(monkeypatch, tmp_path, written):
    monkeypatch.setenv("VCSD_DATA", str(tmp_path))
    (tmp_path / "dev-v1.1.json").write_text(written)
    with pytest.raises(ValueError, match=r"dev-v1\.1\.json: not in the layout of squad"):
        texts.check(Path("squad"))


def test_existing_file_takes_precedence_over_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("code").write_text("mine")
    assert texts.read(Path("code")) == "mine"
    with pytest.raises(FileNotFoundError):
        texts.check(Path("nowhere.txt"))
