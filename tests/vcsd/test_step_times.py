"""Step times of methods on the same prompt.

partner of: vcsd/step_times.py, host_driver/first_steps.py
"""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from csd_firmware import InProcessDrive
from csd_link.driveset import DriveSetConfig
from csd_spec import NAMED, AttentionConfig, CompressionBudget, ModelShape
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from host_driver import first_steps
from host_driver.driver import Driver
from host_driver.first_steps import FirstSteps
from vcsd.step_times import _faster_from, time_steps
from vcsd.transport import open_drives

SHAPE = ModelShape(name="small", layers=4, q_heads=4, kv_heads=2, head_dim=64)
TOKENS = 700
SPARF = AttentionConfig()


def recorded(shape=SHAPE, specs=(INSTCSD_ZYNQ7045_8CH,) * 2, tokens=TOKENS, rows=1):
    """Random keys and values, and a step."""
    draw, made = np.random.default_rng(0).standard_normal, FirstSteps()
    made.begin(specs, shape, rows, tokens + 8, False)
    lengths = np.full(rows, tokens)

    def rows_of(count, heads):
        return draw((count, heads, shape.head_dim), np.float32).astype(np.float16)

    for layer in range(shape.layers):
        made.add_prompt(layer, slice(None), lengths, *(rows_of(rows * tokens, shape.kv_heads) for _ in "kv"))
        qkv = tuple(rows_of(rows, heads) for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads))
        made.add_step(layer, slice(None), qkv, None)
    made.end_step()
    return made


@pytest.fixture(scope="module")
def times():
    return time_steps(recorded(), "sparf", SPARF)


def test_time_steps_dense_and_ssd_have_no_error(times):
    assert times.output_errors["dense"] == times.output_errors["plain_ssd"] == 0
    assert 0 < times.output_errors["sparf"] < 2 and 0 < times.output_errors["ours"] < 2
    assert (times.context_tokens, times.sequences, times.layers_measured) == (TOKENS, 1, 4)


def test_time_steps_plain_ssd_takes_its_link(times):
    drive_bytes = SHAPE.kv_bytes_per_token * TOKENS // 2
    at_least = INSTCSD_ZYNQ7045_8CH.link.transfer_ns(drive_bytes)
    assert at_least < times.step_times_ns["plain_ssd"] < 1.5 * at_least
    half = replace(INSTCSD_ZYNQ7045_8CH.link, bytes_per_s=INSTCSD_ZYNQ7045_8CH.link.bytes_per_s // 2)
    slower = time_steps(recorded(specs=(replace(INSTCSD_ZYNQ7045_8CH, link=half),) * 2), "sparf", SPARF)
    assert slower.step_times_ns["plain_ssd"] > times.step_times_ns["plain_ssd"] + 0.9 * at_least
    assert slower.step_times_ns["dense"] < 1.05 * times.step_times_ns["dense"]  # q, k, v and the output alone


@pytest.mark.parametrize("tokens", [TOKENS + 3, TOKENS + 4])  # the second fills a token group: 704 = 22 x 32
def test_time_steps_full_group_is_not_waited_for(times, tokens):
    """A program takes 600 us."""
    for name, ns in time_steps(recorded(tokens=tokens - 1), "sparf", SPARF).step_times_ns.items():
        assert ns == pytest.approx(times.step_times_ns[name], rel=0.2)


def test_time_steps_two_rows_take_longer(times):
    two = time_steps(recorded(rows=2), "sparf", SPARF)
    assert two.step_times_ns["plain_ssd"] > 1.7 * times.step_times_ns["plain_ssd"]
    assert two.sequences == 2


def test_time_steps_own_method_has_an_entry():
    own = AttentionConfig("quest", CompressionBudget(4))
    done = time_steps(recorded(), "quest", own)
    assert list(done.step_times_ns) == ["dense", "sparf", "ours", "quest", "plain_ssd"]
    assert done.budgets["quest"] == "1/4 (paper)"


def test_time_steps_layout_of_one_precision_left_out_with_reason():
    done = time_steps(recorded(), "ours", replace(NAMED["ours"], layout="fp16"))
    assert "ours" not in done.step_times_ns
    assert "has one precision" in done.left_out["ours"]


def test_time_steps_latent_model_leaves_out_plain_ssd():
    done = time_steps(recorded(replace(SHAPE, name="latent", kv_heads=1, latent=True)), "sparf", SPARF)
    assert set(done.left_out) == {"plain_ssd"}
    assert set(done.step_times_ns) == {"dense", "sparf", "ours"}


def test_first_step_large_model_records_some_layers(times, monkeypatch):
    monkeypatch.setattr(first_steps, "MAX_BYTES", 2 * SHAPE.kv_bytes_per_token // SHAPE.layers * (TOKENS + 8))
    some = recorded()
    assert sorted(some.layers) == [1, 3]
    done = time_steps(some, "sparf", SPARF)
    assert done.layers_measured == 2
    assert done.step_times_ns["dense"] == pytest.approx(times.step_times_ns["dense"], rel=0.1)


def test_drives_are_freed_at_once(monkeypatch):
    """A drive reserves 2 TB of address space: some sixty that wait for the garbage collector are all there is."""
    pages, close = [], InProcessDrive.close
    monkeypatch.setattr(
        InProcessDrive,
        "close",
        lambda drive: pages.append(weakref.ref(drive.firmware.ftl.nand.page_store)) or close(drive),
    )
    gc.disable()
    try:
        time_steps(recorded(), "sparf", SPARF)
        assert len(pages) == 2 * 4 * 5 and not any(page() for page in pages)
    finally:
        gc.enable()


def test_first_steps_driver_keeps_the_first_ones(monkeypatch):
    monkeypatch.setattr(first_steps, "MAX_STEPS", 2)
    with open_drives(DriveSetConfig(count=2)) as devices:
        driver = Driver(devices, SHAPE, AttentionConfig("dense", CompressionBudget(1)))
        driver.recorder = made = FirstSteps()
        batch, rows = driver.create(1, 64), np.ones((40, 2, 64), np.float16)
        for layer in range(SHAPE.layers):
            driver.append(batch, slice(None), layer, np.array([40]), lambda: (rows, rows))
        for number in range(3):
            q = np.full((1, 4, 64), number, np.float16)
            with driver.step(1) as (whole,):
                for layer in range(SHAPE.layers):
                    driver.decode(batch, slice(None), whole, layer, q, rows[:1], rows[:1])
        driver.close()
    assert (made.steps, made.context_tokens, driver.recorder) == (2, 40, None)
    assert [int(step[0][1][0, 0, 0]) for step in made.layers[3].steps] == [0, 1]


def test_shorter_contexts_are_the_beginning_of_each_prompt():
    made = recorded(tokens=20, rows=2)
    for tokens in (20, 7, 30):
        shorter = made.shortened(tokens)
        assert shorter.context_tokens == min(tokens, 20)
        ((_, lengths, k, v),) = shorter.layers[0].prompt
        ((_, _, whole_k, whole_v),) = made.layers[0].prompt
        assert lengths.tolist() == [min(tokens, 20)] * 2
        for part, whole in ((k, whole_k), (v, whole_v)):
            assert np.array_equal(part, np.concatenate([whole[:tokens][:20], whole[20 : 20 + tokens]]))
    assert made.context_tokens == 20


def test_contexts_of_the_chart_are_parts_of_the_prompt(times):
    assert list(times.by_context_ns) == [TOKENS // part for part in (16, 8, 4, 2, 1)]
    assert times.by_context_ns[TOKENS] == times.step_times_ns
    ssd = [steps["plain_ssd"] for steps in times.by_context_ns.values()]
    assert ssd == sorted(ssd) and ssd[-1] > 3 * ssd[0]


@pytest.mark.parametrize(
    ("behind", "tokens"),  # method less plain SSD at 100, 200 and 400 tokens
    [((5, 5, -5), 300), ((5, -5, -5), 150), ((-1, -1, -1), 0), ((-1, 5, -5), 300), ((1, 1, 0), None)],
)
def test_a_method_is_faster_from_the_last_crossing_on(behind, tokens):
    by_context_ns = {
        context: {"ours": 10.0 + by, "plain_ssd": 10.0} for context, by in zip((100, 200, 400), behind, strict=True)
    }
    assert _faster_from(by_context_ns, "ours") == tokens
