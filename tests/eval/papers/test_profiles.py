"""Profiles: every shipped one loads, and invalid fields are named."""

import pytest

from vcsd_eval.papers.profiles import FOLDER, Gpu, Host, Model, Ssd

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
            "memory_gb_per_s: must be less than or equal to 1048576, got 768000000000",
        ),
        ("memory_gib: 48", "memory_gib: 0.048", "memory_gib: must be greater than or equal to 1, got 0.048"),
        ("memory_gib: 48", "memory_gb: 48", "memory_gb: no such field: did you mean memory_gib"),
        ("memory_gib: 48", "memory_gib: 48 GB", "memory_gib: must be a valid number, got '48 GB'"),
        ("fp16_tflops: 154.8", "", "fp16_tflops: is missing"),
        ("name: a6000", "- a", "while parsing|expected|must be an object"),
    ],
)
def test_invalid_profile_field_is_named(tmp_path, old, new, reason):
    file = tmp_path / "mine.yaml"
    file.write_text((FOLDER / "gpu" / "a6000.yaml").read_text().replace(old, new))
    with pytest.raises(ValueError, match=reason):
        Gpu.load(str(file))


def test_unknown_profile_lists_available_names():
    with pytest.raises(
        ValueError,
        match="gpu = 'a7000': must be a YAML file or one of a100, a100-40gb, a6000, h100, rtx4090, rtx5060ti-16gb",
    ):
        Gpu.load("a7000")


@pytest.mark.parametrize(
    ("name", "layers", "kv_bytes_per_token", "weight_gib"),
    [
        ("llama-3.1-8b", 32, 131072, 15.0),
        ("llama-3.1-70b", 80, 327680, 131.5),
        ("qwen3-32b", 64, 262144, 61.0),
        ("gemma-3-27b", 10, 81920, 51.0),
        ("gpt-oss-20b", 12, 24576, 12.8),
        ("gpt-oss-120b", 18, 36864, 60.8),
        ("deepseek-v3", 61, (512 + 64) * 2 * 61, 624.9),
    ],
)
def test_model_kv_bytes_per_token_are_as_known(name, layers, kv_bytes_per_token, weight_gib):
    model = Model.load(name)
    assert model.shape.layers == layers
    assert model.shape.kv_bytes_per_token == kv_bytes_per_token
    assert model.weight_bytes / 2**30 == pytest.approx(weight_gib, abs=0.1)


def test_windowed_layers_store_only_their_window():
    gemma = Model.load("gemma-3-27b")
    assert gemma.window_bytes(512) * 2 == gemma.window_bytes(1024) == gemma.window_bytes(131072) == 416 * 2**20


def test_experts_read_grow_with_batch():
    oss = Model.load("gpt-oss-120b")
    assert oss.read_bytes(1) / oss.weight_bytes == pytest.approx(5.13 / 116.83)
    assert oss.read_bytes(1000) / oss.weight_bytes == pytest.approx(1)


def test_several_gpus_multiply_one_gpu():
    one, eight = Gpu.load("h100"), Gpu.some("8xh100")
    assert (eight.name, eight.memory_gib, eight.fp16_tflops) == ("8xh100", 8 * one.memory_gib, 8 * one.fp16_tflops)
    assert Gpu.some("h100") == one
    assert one.holding(150e9).name == "2xh100"


@pytest.mark.parametrize(("name", "reason"), [("0xh100", "1 to 64"), ("65xh100", "1 to 64"), ("²xh100", "YAML file")])
def test_indivisible_number_of_gpus_is_refused(name, reason):
    with pytest.raises(ValueError, match=reason):
        Gpu.some(name)


@pytest.mark.parametrize(
    ("line", "reason"), [("window: 9", "window_layers = 0 must both be 0"), ("window_layers: 32", "fewer")]
)
def test_invalid_window_layers_are_refused(tmp_path, line, reason):
    file = tmp_path / "mine.yaml"
    file.write_text((FOLDER / "model" / "llama-3-8b.yaml").read_text() + line)
    with pytest.raises(ValueError, match=reason):
        Model.load(str(file))
