"""A 6-bit layout that the product does not know supports everything that the shipped layouts do.

It is the file `int6.py` in this folder, loaded as a user's. In the tree it would touch two product files: its codec in
csd_spec/codecs/int6.py, and its line in csd_spec/layouts/table.py.

partner of: attention_engine/decoded.py
"""

import textwrap
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import vcsd
from attention_engine import reference
from csd_firmware import InProcessDrive
from csd_io.medium import BLOCK, Medium
from csd_link import wire
from csd_spec import Attend, Flush, KvAppend, KvCrop, KvRead, SeqCreate, SeqFork, Status
from csd_spec.layouts import layout_named, layouts, load_layouts, table
from csd_spec.tables import Tables
from ftl import Ftl, round_to_codec, token_bytes
from tests.host_driver.hf.test_storage import decode, llama
from tests.layouts import int6
from vcsd_eval.verify import random_host
from vcsd_eval.verify.crash import bench_crash

FILE = Path(int6.__file__)
H, D, G = 2, 16, 2


@pytest.fixture(autouse=True)
def layout(monkeypatch):
    monkeypatch.setattr(table, "_OF_FILES", {})
    load_layouts(FILE)
    return layout_named("int6")


def rows(seed, tokens, heads=H, dim=D):
    return np.random.default_rng(seed).standard_normal((tokens, heads, dim)).astype(np.float16)


def done(device, command, now_ns=0):
    completion = device.submit(command, now_ns).result()
    assert completion.status is Status.SUCCESS, completion.reason
    return completion


def test_codec_keeps_6_bits_and_is_idempotent(layout):
    values = rows(0, 50).view(np.uint16)
    vectors = layout.rows.encode(values)
    assert vectors.shape[-1] == layout.rows.row_bytes(D) == 13
    stored = layout.rows.decode(vectors, D)
    wide, given = (each.view(np.float16).astype(np.float64) for each in (stored, values))
    assert (np.abs(wide - given) <= np.abs(given).max(-1, keepdims=True) / 31).all()
    np.testing.assert_array_equal(layout.rows.encode(stored), vectors)
    extremes = np.array([[65504, -65504, 6e-8, 0], [0, 0, 0, 0], [6e-8, -6e-8, 0, 0]], np.float16).view(np.uint16)
    stored = layout.rows.decode(layout.rows.encode(extremes), 4)
    assert np.isfinite(stored.view(np.float16)).all()
    np.testing.assert_array_equal(layout.rows.decode(layout.rows.encode(stored), 4), stored)


def test_example_of_the_docs_is_a_layout(small_drive):
    text = (Path(vcsd.__file__).parents[1] / "docs" / "layouts.md").read_text(encoding="utf-8")
    code = textwrap.dedent(text.partition("```python\n")[2].partition("```")[0])
    exec(code, names := {})
    rows8, values = names["LAYOUTS"]["rows8"], rows(0, 50).view(np.uint16)
    stored = rows8.rows.decode(vectors := rows8.rows.encode(values), D)
    np.testing.assert_array_equal(rows8.rows.encode(stored), vectors)
    np.testing.assert_allclose(stored.view(np.float16), values.view(np.float16), atol=4 / 127)
    assert rows8.form(4096, 128, 2048).n == 31


def test_six_bit_pages_hold_twice_the_rows(layout):
    form, fp16 = (each.form(4096, 128, 8192) for each in (layout, layout_named("fp16")))
    assert (form.n, form.row_bytes) == (42, 97) and fp16.n == 16
    assert sum(token_bytes(form, H).values()) < 0.4 * sum(token_bytes(fp16, H).values())


def test_append_fork_crop_collection_and_recovery(small_drive, layout):
    ftl, form = Ftl(small_drive), layout.form(small_drive.geometry.page_bytes, D, 512)
    (handle,) = ftl.create(1, 1, H, form)
    k, v = rows(0, 150), rows(1, 150)
    for first in (0, 50, 100):
        part = slice(first, first + 50)
        ftl.append([handle], 0, np.array([50]), k[part], v[part], 0)
    child = ftl.fork(handle)
    ftl.crop(handle, 0, 70, 0)
    for _ in range(20):  # garbage for the collector
        (other,) = ftl.create(1, 1, H, form)
        ftl.append([other], 0, np.array([150]), k, v, 0)
        ftl.free([other], 0)
    ftl.flush(0)
    ftl.nand.power_on()
    ftl = Ftl(small_drive, ftl.nand)
    for each, length in ((handle, 70), (child, 150)):
        stored_k, stored_v, _ = ftl.read_back(each, 0)
        np.testing.assert_array_equal(stored_k, round_to_codec(form, k)[:length])
        np.testing.assert_array_equal(stored_v, round_to_codec(form, v)[:length])


def test_crash_sweep_loses_nothing(monkeypatch, layout):
    forms = [layout.paged(random_host.DRIVE.geometry.page_bytes, random_host.DIM, m) for m in (2, 4, 8)]
    monkeypatch.setattr(random_host, "FORMS", forms)
    result = bench_crash(300, 0)
    assert result["cuts"] >= 300
    assert (result["lost"], result["wrong"], result["recovered"]) == (0, 0, result["cuts"])


def stored_in(device, layout, tokens):
    """A sequence of one layer, and its K and V as stored, (S, H, d) float64."""
    seqs = tuple(done(device, SeqCreate(1, 1, H, D, 512, layout.code)).data[0].tolist())
    k, v = rows(2, tokens), rows(3, tokens)
    done(device, KvAppend(seqs, 0, np.array([tokens]), k, v))
    form = layout.form(device.spec.geometry.page_bytes, D, 512)
    return seqs, [round_to_codec(form, each).astype(np.float64) for each in (k, v)]


def attended(device, seqs, method, seed, tokens):
    """The output (H, G, d) of a step with a budget of all its `tokens`, and the query, key and value of that step."""
    generator = np.random.default_rng(seed)
    q = generator.standard_normal((1, H, G, D)).astype(np.float16)
    k, v = (generator.standard_normal((1, H, D)).astype(np.float16) for _ in "kv")
    done_by = done(device, Attend(seqs, 0, q, k, v, method, D, np.array([tokens]), np.array([tokens // 4])))
    return done_by.data[0][0].astype(np.float64), q[0].astype(np.float64), k, v


@pytest.mark.parametrize("method", ["dense", "sparf", "sparq", "quest", "paged", "local", "spending"])
@pytest.mark.parametrize("dram_pages", [2048, 40])  # without room in DRAM, K's own pages stand in for unfinished groups
def test_attention_is_exact_over_kept_rows(small_drive, layout, method, dram_pages):
    drive = replace(small_drive, dram_bytes=dram_pages * small_drive.geometry.page_bytes)
    with closing(InProcessDrive(drive)) as device:
        seqs, (K, V) = stored_in(device, layout, 317)
        form = layout.form(drive.geometry.page_bytes, D, 512)
        for seed in range(3):
            out, q, k, v = attended(device, seqs, method, seed, 318 + seed)
            K, V = (np.concatenate([old, round_to_codec(form, new)]) for old, new in ((K, k), (V, v)))
            for head in range(H):
                expected = reference.dense(q[head], K[:, head], V[:, head])
                np.testing.assert_allclose(out[head], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("medium", [Medium("direct", BLOCK)])
def test_files_equal_memory_and_reopen(small_drive, layout, tmp_path, medium):
    drive = replace(small_drive, dram_bytes=1 << 20)
    outputs, back = [], []
    for number, each in enumerate((Medium(), medium)):
        with closing(InProcessDrive(drive, tmp_path / str(number), medium=each)) as device:
            seqs, _ = stored_in(device, layout, 290)
            (child,) = done(device, SeqFork(seqs, np.array([200]))).data[0].tolist()
            done(device, KvCrop(seqs, 0, np.array([250])))
            outputs.append([attended(device, seqs, *how)[0] for how in (("dense", 1, 251), ("sparf", 1, 252))])
            done(device, Flush())
        with closing(InProcessDrive.reopen(tmp_path / str(number), medium=each)) as device:
            read = [done(device, KvRead((seq,), 0)).data for seq in (*seqs, child)]
            back.append([part for parts in read for part in parts])
            outputs[-1].append(attended(device, seqs, "sparf", 2, 60)[0])
    np.testing.assert_array_equal(outputs[0], outputs[1])
    for one, other in zip(*back, strict=True):
        np.testing.assert_array_equal(one, other)


def test_wire_encodes_code_of_the_layout(layout):
    command = SeqCreate(1, 1, H, D, 512, layout.code)
    assert wire.decode(wire.encode(command)) == command


def test_drive_without_the_layout_refuses_it(small_drive, layout, monkeypatch):
    monkeypatch.setattr(table, "_OF_FILES", {})
    with closing(InProcessDrive(small_drive)) as device:
        completion = device.submit(SeqCreate(1, 1, H, D, 512, layout.code), 0).result()
    assert completion.status is Status.INVALID_FIELD
    assert completion.reason.startswith("layout = 240: must be one of 16, ")


@pytest.mark.parametrize("transport", ["inproc", "process"])
def test_model_decodes_with_a_file_of_layouts(monkeypatch, transport):
    """The same tokens on every transport, near those of exact rows."""
    monkeypatch.setattr(table, "_OF_FILES", {})
    torch.manual_seed(0)
    with torch.inference_mode():
        expected = decode(model := llama(), 100)
        with vcsd.attach(model, drives=2, method="dense", layout="int6", layouts_file=FILE, transport=transport) as csd:
            result = decode(model, 100)
    assert csd.report().drives.layout == "int6" and 0 < (result - expected).abs().max() < 1


def test_entry_point_adds_the_layout(monkeypatch):
    monkeypatch.setattr(table, "_OF_FILES", {})
    monkeypatch.setattr(Tables, "plugged_in", lambda self: int6.LAYOUTS if self.group == "vcsd.layouts" else {})
    assert layouts()["int6"] is int6.LAYOUTS["int6"] and vcsd.LAYOUTS.get("int6") is None
