"""Systems on small batches, compared with the sum of their parts."""

from dataclasses import replace

import pytest

from csd_spec.presets import INSTCSD_ZYNQ7045_8CH as PAPER
from nvmevirt_config.describe import SHIPPED, load_drive
from tests.eval.papers.instinfer.setups import in_storage, setup_of
from vcsd_eval.papers.instinfer import fill
from vcsd_eval.papers.instinfer.systems import (
    BATCHED_DENSE,
    DENSE,
    ON_HOSTS,
    OURS,
    PAGED,
    SPARF,
    Breakdown,
    deepspeed,
    flexgen,
    pinned_bytes,
)
from vcsd_eval.papers.profiles import FOLDER, Gpu, Host, Model


def test_dense_step_is_flash_engine_and_rest():
    """Batch 4: KV data at 8 x 1.4 GB/s, 116 multiply-accumulates a cycle, both within the overhead of whole pages and
    senses.
    """
    setup = setup_of()
    (result,) = in_storage(setup, (DENSE,), 4, 1)
    kv_bytes = setup.kv_bytes(4, setup.steps.mean())
    assert result.step.kv_s == pytest.approx(kv_bytes / 11.2e9, rel=0.02)
    assert result.step.engine_s == pytest.approx(kv_bytes / 2 / (116 * 285e6), rel=0.02)
    parts = result.step.kv_s + result.step.engine_s + result.step.other_s
    assert result.step.total_s == pytest.approx(parts)
    assert result.tokens_per_s == pytest.approx(4 * 1024 / (result.prefill_s + 1024 * result.step.total_s))


def test_two_drives_halve_only_flash_and_engine():
    setup = setup_of()
    one, two = (in_storage(setup, (SPARF,), 4, drives)[0].step for drives in (1, 2))
    assert two.kv_s == pytest.approx(one.kv_s / 2, rel=0.1)  # few pages for each channel
    assert two.engine_s == pytest.approx(one.engine_s / 2, rel=0.01)
    assert two.other_s == pytest.approx(one.other_s, rel=0.1)


def test_ours_is_faster_at_more_accuracy_than_instinfer():
    setup = setup_of()
    sparf, dense, ours, ours_dense = in_storage(setup, (SPARF, DENSE, PAGED, BATCHED_DENSE), 8, 1)
    assert ours.tokens_per_s > 1.5 * sparf.tokens_per_s
    assert ours_dense.tokens_per_s > dense.tokens_per_s


@pytest.mark.parametrize("model", sorted(path.stem for path in FOLDER.glob("model/*.yaml")))
@pytest.mark.parametrize("gpu", sorted(path.stem for path in FOLDER.glob("gpu/*.yaml")))
def test_every_model_on_every_gpu_runs_or_does_not_fit(model, gpu):
    if Model.load(model).weight_bytes > Gpu.load(gpu).memory_gib * 2**30:
        with pytest.raises(ValueError, match=f"gpu = {gpu}: .* do not hold the weights of {model}"):
            setup_of(model, gpu)
        return
    setup = replace(setup_of(model, gpu), input=64, output=64)
    for result in [deepspeed(setup, 1, 1), flexgen(setup, 1, 1), *in_storage(setup, (DENSE, SPARF, PAGED), 1, 1)]:
        assert result.tokens_per_s > 0
        assert not result.reason


@pytest.mark.parametrize("host", sorted(path.stem for path in FOLDER.glob("host/*.yaml")))
@pytest.mark.parametrize("drive", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_host_and_every_drive_runs(host, drive):
    setup = replace(setup_of("opt-6.7b", drive=load_drive(drive)), host=Host.load(host), input=64, output=64)
    for result in [deepspeed(setup, 1, 1), *in_storage(setup, (DENSE,), 1, 1)]:
        assert result.tokens_per_s > 0


def test_host_systems_equal_their_closed_forms():
    setup = setup_of()
    c, kv = setup.constants, setup.kv_bytes(16, setup.steps.mean())
    step = deepspeed(setup, 16, 1).step
    assert step.kv_s == pytest.approx((setup.model.weight_bytes + kv) / (32e9 * c.host_link_share))
    assert flexgen(setup, 16, 1).step.kv_s == pytest.approx(kv / c.cached_path)
    large = setup.kv_bytes(64, setup.steps.mean())  # beyond the page cache: from the SSD first, at 7 GB/s
    assert flexgen(setup, 64, 1).step.kv_s == pytest.approx(large / c.cached_path + large / 7e9)
    assert flexgen(setup, 64, 2).tokens_per_s == flexgen(setup, 64, 1).tokens_per_s
    assert "GPU's memory" in flexgen(setup, 128, 1).reason


def test_deepspeed_opt_30b_swaps_at_batch_16():
    setup = setup_of("opt-30b", gpu="a100")
    assert setup.model.weight_bytes + setup.kv_bytes(16, 2048) > setup.host.dram_gib * 2**30
    fits, swaps = (deepspeed(setup, batch, 1).step.total_s for batch in (8, 16))
    assert fits < 5 and swaps > 100


def test_gpu_too_small_for_weights_is_refused():
    with pytest.raises(ValueError, match="gpu = rtx4090: 24 GiB do not hold the weights of opt-30b"):
        setup_of("opt-30b", gpu="rtx4090")


def test_more_drives_than_heads_are_refused():
    with pytest.raises(ValueError, match="drives = 41: the model has 40 KV heads"):
        in_storage(setup_of(), (DENSE,), 1, 41)


def test_shares_of_parts_and_hidden_time():
    step = Breakdown(kv_s=6, engine_s=1, other_s=3, hidden_s=2)
    assert (step.parts_s, step.total_s, step.kv_share) == (10, 8, 0.6)


def test_batch_beyond_drive_capacity_has_reason():
    small = replace(PAPER, geometry=replace(PAPER.geometry, blocks_per_plane=16))
    (result,) = in_storage(setup_of(drive=small), (DENSE,), 16, 1)
    assert "batch = 16 is too much for 1 drives of 0.0086 TB" in result.reason


def test_baselines_follow_their_data_sheets():
    setup = replace(setup_of("llama-3.1-8b", "h100"), input=32768, output=64)
    rate, kv = 3350e9, setup.kv_bytes(4, setup.steps.mean())
    gpu, host, vllm = (ON_HOSTS[name](setup, 4, 1) for name in ("GPU", "Host", "vLLM"))
    assert gpu.step.total_s == pytest.approx((setup.model.weight_bytes + kv) / rate)
    assert vllm == replace(gpu, system="vLLM")
    assert host.step.total_s == pytest.approx(max(kv / 32e9, gpu.step.total_s), rel=0.1)
    assert "h100 holds 15 GiB of weights and K and V of 16 such" in ON_HOSTS["GPU"](setup, 64, 1).reason
    waves = ON_HOSTS["vLLM"](setup, 60, 1)
    assert waves.tokens_per_s < ON_HOSTS["GPU"](setup, 16, 1).tokens_per_s
    assert "do not fit" in ON_HOSTS["vLLM"](replace(setup, input=1 << 20), 1, 1).reason


def test_windowed_layers_cost_gpu_their_window():
    gemma = replace(setup_of("gemma-3-27b", "h100"), input=32768)
    whole = replace(gemma.model, layers=10, window_layers=0, window=0)
    more_s = gemma.gpu_s(8) - replace(gemma, model=whole).gpu_s(8)
    assert more_s == pytest.approx(8 * 416 * 2**20 / 3350e9)
    assert gemma.simulated_layers == 2


def test_latent_rows_in_all_drives_query_heads_split():
    latent = replace(setup_of("llama-3.1-8b", "h100"), input=256, output=64)
    latent = replace(latent, model=replace(latent.model, kv_heads=1, head_dim=576, q_heads=128, latent=True))
    one, two = (in_storage(latent, (DENSE,), 4, drives)[0] for drives in (1, 2))
    assert two.step.engine_s == pytest.approx(one.step.engine_s / 2, rel=0.01)
    assert two.step.kv_s == pytest.approx(one.step.kv_s)
    assert one.step.engine_s > 10 * one.step.kv_s
    (ours,) = in_storage(latent, (OURS,), 4, 1)
    assert 0 < ours.step.kv_s < one.step.kv_s, "codes are fewer bytes"


@pytest.mark.parametrize("system", [DENSE, SPARF, OURS], ids=lambda system: system.name)
def test_sampled_sequences_represent_all(system, monkeypatch):
    """SparF's and our rows that wait for their group exceed DRAM by the same share in a sample."""
    drive = replace(PAPER, dram_bytes=640 << 20)
    setup = replace(setup_of(drive=drive), input=1024, output=512)
    (every,) = in_storage(setup, (system,), 32, 1)
    a_sequence = 2 * fill.Fill(setup, system, 32, 1)._layer_pages
    monkeypatch.setattr(fill, "SAMPLED_PAGES", 8 * a_sequence)
    (part,) = in_storage(setup, (system,), 32, 1)
    assert (every.simulated_sequences, part.simulated_sequences) == (32, 8)
    assert part.tokens_per_s == pytest.approx(every.tokens_per_s, rel=0.03)


def test_pinned_buffers_have_power_of_two_sizes():
    """K of OPT-13B's layer at batch 32, 640 MiB, takes 1 GiB; so DeepSpeed swaps there, and at batch 16 it does not."""
    assert [pinned_bytes(mib << 20) >> 20 for mib in (512, 640, 1024, 1025)] == [512, 1024, 1024, 2048]
    assert deepspeed(setup_of(), 32, 1).step.total_s > 20 * deepspeed(setup_of(), 16, 1).step.total_s
