"""Profiles: every shipped one loads, and what is off is named."""

import pytest

from eval.papers.profiles import FOLDER, Gpu, Host, Model, Ssd

KINDS = {"gpu": Gpu, "host": Host, "ssd": Ssd, "model": Model}
SHIPPED = sorted(FOLDER.glob("*/*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_shipped_profile_loads(path):
    kind = KINDS[path.parent.name]
    profile = kind.load(path.stem)
    assert profile.name == path.stem
    assert profile == kind.load(str(path))
    if kind is Model:
        assert profile.shape.kv_bytes_per_token > 0


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "memory_gb_per_s: 768",
            "memory_gb_per_s: 768000000000",
            "memory_gb_per_s: must be less than or equal to 20000, got 768000000000",
        ),
        ("memory_gib: 48", "memory_gib: 0.048", "memory_gib: must be greater than or equal to 1, got 0.048"),
        ("memory_gib: 48", "memory_gb: 48", "memory_gb: no such field: did you mean memory_gib"),
        ("memory_gib: 48", "memory_gib: 48 GB", "memory_gib: must be a valid number, got '48 GB'"),
        ("fp16_tflops: 154.8", "", "fp16_tflops: is missing"),
        ("name: a6000", "- a", "while parsing|expected|must be an object"),
    ],
)
def test_what_is_off_is_named(tmp_path, old, new, reason):
    file = tmp_path / "mine.yaml"
    file.write_text((FOLDER / "gpu" / "a6000.yaml").read_text().replace(old, new))
    with pytest.raises(ValueError, match=reason):
        Gpu.load(str(file))


def test_an_unknown_name_lists_those_there_are():
    with pytest.raises(
        ValueError, match="gpu = 'a7000': must be a YAML file or one of a100, a6000, h100, rtx4090, rtx5060ti-16gb"
    ):
        Gpu.load("a7000")
