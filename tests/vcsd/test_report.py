"""The report adds up the driver's counters."""

import json
from dataclasses import replace

import numpy as np
import pytest

from csd_firmware import InProcessDrive
from csd_spec import AttentionConfig, CompressionBudget, ModelShape
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from host_driver.driver import Driver
from vcsd.report import Report

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
    report = Report.of(driver_after(3))
    assert report.steps == 3
    assert report.plain_offload_bytes_per_step == 602 * SHAPE.kv_bytes_per_token  # of 601, 602 and 603 tokens
    assert report.pages_read == 3 * 2 * 2 * (600 // 32)  # keys and values of two heads, 32 tokens a page
    assert sum(report.breakdown_ns.values()) == report.step_ns
    assert [drive["kv_heads"] for drive in report.drives] == [[0], [1]]
    assert 0 < report.useful_read_fraction <= 1


def test_report_without_steps_is_valid():
    report = Report.of(driver_after(0, tokens=1))
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
    report = Report.of(driver).to_dict()["kv_layout"]
    assert report["bytes_per_token_per_layer"] == pytest.approx(stored)


def test_a_latent_row_is_stored_once_in_every_drive():
    shape = replace(SHAPE, q_heads=8, kv_heads=1, head_dim=576, latent=True)  # DeepSeek V2 and V3
    report = Report.of(driver_of(shape, "latent", drives=2))
    assert report.token_bytes == {"k": 1152, "embedding_k": 1152}
    assert "k 1,152, embedding_k 1,152" in str(report)
    assert report.to_dict()["kv_layout"]["drive_copies"] == report.copies == 2
    assert [drive["q_heads"] for drive in report.drives] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert "drives that store all of it" in str(report)


def test_report_as_json_and_as_text():
    report = Report.of(driver_after(1))
    assert json.loads(json.dumps(report.to_dict()))["simulated_time"]["steps"] == 1
    for title in ("Traffic (1 decode steps)", "Modelled time of a decode step", "Drives"):
        assert title in str(report)
