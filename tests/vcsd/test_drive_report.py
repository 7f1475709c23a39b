"""The report adds up the driver's counters."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import vcsd
from csd_firmware import InProcessDrive
from csd_spec import AttentionConfig, CompressionBudget, ModelShape
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from host_driver.driver import Driver
from vcsd.drive_report import DriveReport, _bytes

SHAPE = ModelShape(name="small", layers=1, q_heads=2, kv_heads=2, head_dim=64)


def driver_of(shape, layout="fp16", drives=1):
    devices = [InProcessDrive(INSTCSD_ZYNQ7045_8CH) for _ in range(drives)]
    return Driver(devices, shape, AttentionConfig("dense", CompressionBudget(1), layout))


def driver_after(steps, tokens=600):
    driver = driver_of(SHAPE, drives=2)
    batch, rows = driver.create(1, 1024), np.ones((tokens, 2, 64), np.float16)
    driver.append(batch, slice(None), 0, np.array([tokens]), lambda: (rows, rows))
    driver.settle()
    one = np.ones((1, 2, 64), np.float16)
    for _ in range(steps):
        with driver.step(1) as (part,):
            driver.decode(batch, slice(None), part, 0, one, one, one)
    return driver


def test_figures_are_means_over_the_steps():
    report = DriveReport.of(driver_after(3))
    assert report.steps == 3
    assert report.plain_offload_bytes_per_step == 602 * SHAPE.kv_bytes_per_token  # of 601, 602 and 603 tokens
    assert report.pages_read == 3 * 2 * 2 * (600 // 32)  # keys and values of two heads, 32 tokens a page
    assert sum(report.breakdown_ns.values()) == report.step_ns
    assert [drive["kv_heads"] for drive in report.shares] == [[0], [1]]
    assert 0 < report.useful_read_fraction <= 1


def test_report_without_steps_is_valid():
    report = DriveReport.of(driver_after(0, tokens=1))
    assert (report.steps, report.step_ns, report.useful_read_fraction) == (0, 0, None)
    assert "nothing read" in str(report)


@pytest.mark.parametrize(
    ("layout", "stored"),
    [
        ("fp16", {"k": 256, "v": 256, "embedding_k": 256}),
        ("fp8", {"k": 130, "v": 130, "embedding_k": 128 + 128 / 511}),
        ("int8", {"k": 256, "v": 256, "embedding_k": 128 + 8 * 64 / 60}),
        ("plain", {"k": 256, "v": 256}),
        ("progressive", {"refined": 256 + 256 / 31, "scores": 4096 * 2 / 176, "values": 4096 * 2 / 224}),
    ],
)
def test_bytes_per_token_follow_layout(layout, stored):
    driver = driver_of(SHAPE, layout)
    driver.create(1, 1024)
    report = DriveReport.of(driver).to_dict()["kv_layout"]
    assert report["bytes_per_token_per_layer"] == pytest.approx(stored)


def test_a_latent_row_is_stored_once_in_every_drive():
    shape = replace(SHAPE, q_heads=8, kv_heads=1, head_dim=576, latent=True)  # DeepSeek V2 and V3
    report = DriveReport.of(driver_of(shape, "latent", drives=2))
    assert report.token_bytes == {"k": 1152, "embedding_k": 1152}
    assert "k 1,152, embedding_k 1,152" in str(report)
    assert report.to_dict()["kv_layout"]["drive_copies"] == report.copies == 2
    assert [drive["q_heads"] for drive in report.shares] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert "drives that store all of it" in str(report)


def test_report_as_json_and_as_text():
    report = DriveReport.of(driver_after(1))
    assert json.loads(json.dumps(report.to_dict()))["simulated_time"]["steps"] == 1
    for title in ("Traffic (1 decode steps)", "Modelled time of a decode step", "Drives"):
        assert title in str(report)


@torch.inference_mode()
def test_bytes_that_speculation_reads_back_are_reported():
    """Forwards of several tokens read the KV data of all layers back: bytes that a plain SSD sends too."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    ids = torch.tensor([[5, 6, 7, 8, 9, 10] * 30])
    reports = {}
    for candidates in (None, 5):
        with vcsd.attach(model, drives=2, method="sparf", compression=8) as csd:
            model.generate(ids, do_sample=False, max_new_tokens=24, prompt_lookup_num_tokens=candidates)
            reports[candidates] = csd.report().drives
    plain, speculating = reports[None], reports[5]
    assert plain.read_back.forwards == 0 and "read back and attended on the host" not in str(plain)
    back = speculating.read_back
    stored = ids.shape[1] * 2 * 2 * 2 * 16 * 2  # tokens x layers x (k, v) x heads x channels x FP16
    assert back.link_bytes >= back.forwards * stored > 0 and back.tokens > back.forwards
    assert speculating.link_bytes >= back.link_bytes + speculating.steps * speculating.link_bytes_per_step
    assert speculating.saved == speculating.plain_offload_bytes / speculating.link_bytes < plain.saved / 4
    assert f"read back and attended on the host, {back.forwards} forwards" in str(speculating)
    assert speculating.to_dict()["link_bytes"]["read_back"]["link_bytes"] == back.link_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0.0 B"),
        (1023, "1,023.0 B"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 40, "5,120.0 GiB"),
    ],
)
def test_bytes_are_told_in_the_largest_unit_up_to_gib(count, text):
    assert _bytes(count) == text
