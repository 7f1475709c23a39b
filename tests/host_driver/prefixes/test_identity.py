"""A model's identity: the same however its path is written, another after any change of configuration or files."""

import os
from enum import Enum

import pytest

from host_driver.prefixes.identity import HEAD_BYTES, PIECE_BYTES, ModelIdentity, canonical, files_of


@pytest.fixture
def model(tmp_path):
    """A folder with weights of 3 MiB and a configuration."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights.safetensors").write_bytes(bytes(3 * HEAD_BYTES))
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("a model")
    return folder


def digest(path, check="sampled", **config):
    return ModelIdentity(name=str(path), config=canonical(config), files=files_of(path, check), check=check).digest


def overwrite(file, at, data):
    """Replace bytes of a file in place; its size and the time of its last change stay."""
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(data)
    os.utime(file, ns=times)


@pytest.mark.parametrize("check", ["sampled", "content"])
def test_identity_is_of_the_model_not_of_its_path(model, check, tmp_path, monkeypatch):
    before = digest(model, check)
    (tmp_path / "link").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    (model / "README.md").write_text("the same model")
    assert digest(tmp_path / "link", check) == digest(model.relative_to(tmp_path), check) == before


def test_sampled_identity_depends_on_file_content(model):
    weights, seen = model / "weights.safetensors", [digest(model)]
    changes = [
        lambda: os.utime(weights, ns=(1, 1)),
        lambda: overwrite(weights, 100, b"shape"),
        lambda: overwrite(weights, HEAD_BYTES, bytes([1]) * (2 * HEAD_BYTES)),
        lambda: os.truncate(weights, HEAD_BYTES),
        lambda: (model / "model.py").write_text("code"),
        lambda: (model / "parts").mkdir() or (model / "parts" / "more.bin").write_bytes(b"x"),
    ]
    for change in changes:
        change()
        assert digest(model) not in seen
        seen.append(digest(model))


def test_content_identity_sees_every_byte_and_no_time(model):
    weights = model / "weights.safetensors"
    before, sampled = digest(model, "content"), digest(model)
    os.utime(weights, ns=(1, 1))
    assert digest(model, "content") == before and digest(model) != sampled
    sampled = digest(model)
    overwrite(weights, HEAD_BYTES + PIECE_BYTES + 1, b"x")
    assert digest(model, "content") != before and digest(model) == sampled, "this byte is between two pieces"


def test_cyclic_links_between_folders_end(model):
    (model / "loop").symlink_to(model)
    assert [file.name for file in files_of(model)] == ["config.json", "weights.safetensors"]


def test_single_file_is_a_model_missing_is_refused(model, tmp_path):
    assert [file.name for file in files_of(model / "weights.safetensors", prefix="draft/")] == [
        "draft/weights.safetensors"
    ]
    (model / "weights.safetensors").unlink()
    with pytest.raises(ValueError, match="contains no weights"):
        files_of(model)
    with pytest.raises(ValueError, match="contains no weights"):
        files_of(tmp_path / "missing")


def test_equal_configurations_have_equal_text():
    kind = Enum("Kind", ["A", "B"])
    one = {
        "rope": {"theta": 1e4, "type": "yarn"},
        "heads": (1, 2),
        "names": {"b", "a"},
        3: kind.A,
        "_name_or_path": "x",
    }
    other = {"3": kind.A, "names": {"a", "b"}, "heads": [1, 2], "rope": {"type": "yarn", "theta": 1e4, "_x": 1}}
    assert canonical(one) == canonical(other)
    assert len({canonical({"x": value}) for value in (1e4, 1e5, True, None, kind.A, kind.B, "text")}) == 7
    assert ModelIdentity.from_text("a").digest != ModelIdentity.from_text("b").digest


def test_numbers_and_texts_of_a_configuration_stay_what_they_are():
    config = {"a": None, "b": 1, "c": 0.5, "d": True, "e": "1", "f": [1, (2, "x")], "g": {"_hidden": 1, "seen": 1}}
    assert canonical(config) == (
        '{"a": null, "b": 1, "c": 0.5, "d": true, "e": "1", "f": [1, [2, "x"]], "g": {"seen": 1}}'
    )
    assert canonical({"dtype": object}) == '{"dtype": "<class \'object\'>"}'
