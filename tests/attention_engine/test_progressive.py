"""The progressive method: pages read, and attention to exactly these pages.

partner of: attention_engine/methods/progressive.py, attention_engine/arithmetic.py
"""

import numpy as np
import pytest

import attention_engine.step
from attention_engine import METHODS, Arithmetic, Compute, Read, merge, reference
from attention_engine.methods.progressive import LOST, progressive
from csd_spec import NAMED
from csd_spec.view import UNMAPPED, in_flash
from tests.attention_engine.low_bit_drive import Drive, H, fetched, in_few_bits

KINDS = pytest.mark.parametrize("bf16", [False, True])
SHAPES = [
    (64, 2, "progressive", 1500),
    (80, 3, "progressive4", 900),
    (128, 5, "progressive-exact", 700),
    (256, 1, "progressive", 500),
    (96, 8, "progressive4", 600),
    (576, 4, "progressive-latent", 400),
]


def layout_of(name, bf16):
    return name.replace("-exact", "").replace("-latent", "") + "-bf16" * bf16 + name[name.find("-") :] * ("-" in name)


def run(step, **options):
    """Output, logits by scores, and the choice of a step."""
    pages, choose = {}, step.choose_pages

    def spy(logits, *arguments):
        pages["logits"] = logits.copy()
        pages["choice"] = choose(logits, *arguments)
        return pages["choice"]

    step.choose_pages = spy
    return progressive(step, **options), pages["logits"], pages["choice"]


def emulated(drive, step, logits, choice, stream):
    """In float64, of each query of a stream: the output, m + log l, the share that is lost, and the sizes of V."""
    K, V = drive.stream(stream)
    coarse, form, length = in_few_bits(step, "values", stream), step.view.layout.progressive, len(K)
    chosen = choice.tokens[stream, : choice.counts[stream]]
    x = logits[stream, :, :length].astype(np.float64)
    x[:, chosen] = step.q[stream].astype(np.float64) @ K[chosen].T / np.sqrt(step.head_dim)
    read = choice.reads[stream, np.arange(length) // form.value_tokens]
    values = np.where(read[:, None], coarse, step.v_mean[stream])
    values[chosen], read[chosen] = V[chosen], True
    weights = np.exp(x - x.max(1, keepdims=True))
    total = weights.sum(1)
    lost = (weights * ~read).sum(1) / total
    return weights @ values / total[:, None], x.max(1) + np.log(total), lost


@pytest.mark.parametrize(("d", "G", "name", "tokens"), SHAPES)
@KINDS
def test_output_equals_attention_at_chosen_precisions(d, G, name, tokens, bf16):
    """Chosen pages in 8 bits, or rows as they wait, all others in few bits, or by the mean of V."""
    drive = Drive(d, layout_of(name, bf16), [tokens, tokens // 3], alone=5)
    if name.endswith("-exact"):
        drive = as_refined(drive)
    for sharp in (1, 4):
        step = drive.step(G, 5, sharp=sharp)
        out, logits, choice = run(step)
        for stream in range(step.streams):
            expected, whole, lost = emulated(drive, step, logits, choice, stream)
            error = np.linalg.norm(out[stream] - expected, axis=1) / np.linalg.norm(expected, axis=1)
            assert error.max() < 0.03 and error.mean() < 0.02 and np.isfinite(out).all()
            np.testing.assert_allclose(step.rows[stream, :, 0] + np.log(step.rows[stream, :, 1]), whole, atol=2e-5)
            np.testing.assert_allclose(step.lost[stream], lost, rtol=1e-3, atol=1e-6)
        for row, count in zip(*step.chosen, strict=True):
            assert (np.diff(row[:count]) > 0).all()


def as_refined(drive):
    """K and V of full groups as their 8-bit codes have them, for layouts that keep rows too."""
    from ftl.kv.layouts.codes import refined, to_fp32

    view, form = drive.ftl.view(drive.handles, 0), drive.form.progressive
    for stream in range(view.seq_lens.size):
        for rows in (drive.K, drive.V):
            rows[stream // H] = rows[stream // H].copy()
        slots = view.maps["refined"][stream, 0]
        for group in np.flatnonzero(in_flash(slots)):
            drive.ftl.store.page_in(slots[group : group + 1])
            page = view.banks[0][slots[group]][None].view(np.uint8)
            back, of_group = to_fp32(refined(page, form), form.bf16)[0], slice(group * form.n, (group + 1) * form.n)
            drive.K[stream // H][of_group, stream % H] = back[:, : drive.d]
            drive.V[stream // H][of_group, stream % H] = back[:, -drive.d :]
    return drive


@KINDS
@pytest.mark.parametrize("latent", [False, True])
def test_pages_not_chosen_do_not_matter(latent, bf16):
    """Every refined and value page that was not fetched is poisoned: not a bit changes."""
    drive = Drive(64, f"progressive{'-bf16' * bf16}{'-latent' * latent}", [1500, 900], alone=4)
    out = METHODS["progressive"](step := drive.step(2, 7, sharp=3))
    rows, lost = step.rows.copy(), step.lost.copy()
    for name in ("refined", "values"):
        pages = step.view.maps[name]
        poisoned = np.setdiff1d(pages[in_flash(pages)], fetched(step, "flash_token"))
        assert poisoned.size
        drive.ftl.nand.content[poisoned] = 0x7F
    again = drive.step(2, 7, sharp=3)
    np.testing.assert_array_equal(METHODS["progressive"](again), out)
    np.testing.assert_array_equal(again.rows, rows)
    np.testing.assert_array_equal(again.lost, lost)


@KINDS
@pytest.mark.parametrize(("d", "name"), [(64, "progressive"), (576, "progressive-latent")])
def test_number_of_threads_changes_no_bit(monkeypatch, d, name, bf16):
    monkeypatch.setattr(attention_engine.step, "WORTH_THREADS", 0)
    drive, outs = Drive(d, layout_of(name, bf16), [700, 300, 40], alone=3), []
    for threads in (1, 2, 5):
        step = drive.step(6, threads=threads)
        assert step.threads == threads
        outs.append((progressive(step), step.rows, step.lost, step.errors))
    for one, *others in zip(*outs, strict=True):
        for other in others:
            np.testing.assert_array_equal(other, one)


def always(step):
    """Bytes that a step reads with any budget: score pages, and refined pages of tokens without low-bit codes."""
    maps, form = step.view.maps, step.view.layout.progressive
    held = ((maps["scores"][:, 0] != UNMAPPED).sum(1) * form.T, (maps["values"][:, 0] != UNMAPPED).sum(1))
    held = np.minimum(held[0], held[1] * form.value_tokens)
    ends = (np.arange(maps["refined"].shape[2]) + 1) * form.n
    must = in_flash(maps["refined"][:, 0]) & (ends > held[:, None])
    return form.page_bytes * (int(in_flash(maps["scores"]).sum()) + int(must.sum()))


@pytest.mark.parametrize("c", [1.5, 3, 5, 8, 16])
@pytest.mark.parametrize(("d", "name"), [(64, "progressive"), (128, "progressive4"), (576, "progressive-latent")])
def test_budget_is_kept_by_all_streams_together(d, name, c):
    step = Drive(d, name, [1600, 700, 130], alone=3).step(2, c, sharp=2)
    progressive(step)
    nbytes = int(step.fetched_bytes.sum())
    assert nbytes <= max(int(step.budget_bytes.sum()), always(step))
    assert [item.unit for item in step.work if isinstance(item, Read)] == ["flash_embed", "flash_token", "flash_token"]
    units = [item.unit for item in step.work if isinstance(item, Compute)]
    assert units == ["logit0", "argtopk", "logit", "attend", "attend"]


@pytest.mark.parametrize("sharp", [0.3, 1, 4])
def test_lost_mass_is_small_if_budget_suffices(sharp):
    """At most a twentieth by scores; by the exact logits of the chosen tokens it may be slightly more."""
    step = Drive(64, "progressive", [1800], alone=3).step(4, 2, sharp=sharp)
    progressive(step)
    assert step.lost.max() <= 1.1 * LOST and step.lost.shape == (H, 4)
    more = Drive(64, "progressive", [1800], alone=3).step(4, 2, sharp=sharp)
    progressive(more, lost=0)
    assert (more.lost == 0).all()


@KINDS
def test_larger_budget_lowers_error(bf16):
    drive = Drive(128, layout_of("progressive4-exact", bf16), [1200])
    errors = []
    for c in (12, 4, 2.5, 1.2):
        step = drive.step(4, c, sharp=2)
        out = progressive(step)
        expected = np.stack([reference.dense(step.q[h].astype(np.float64), *drive.stream(h)) for h in range(H)])
        errors.append(np.linalg.norm(out - expected) / np.linalg.norm(expected))
    assert errors[0] > errors[1] > errors[2] > errors[3] and errors[3] < 0.03


def test_estimated_error_matches_measured():
    """Expected error of the codes of keys and values, within a factor of two of the error against dense attention, if
    only scores are refined.
    """
    drive, estimated, expected = Drive(64, "progressive", [1500]), [], []
    for seed in range(6):
        step = drive.step(4, 5, seed=seed)
        out = progressive(step, lost=0, least=1)
        for stream in range(H):
            exact = reference.dense(step.q[stream].astype(np.float64), *drive.stream(stream))
            estimated.append(np.linalg.norm(out[stream] - exact, axis=1) / np.linalg.norm(out[stream], axis=1))
            expected.append(step.errors[stream])
    ratio = np.sqrt(np.mean(np.square(estimated)) / np.mean(np.square(expected)))
    assert 0.5 < ratio < 2


@KINDS
def test_parts_of_a_sequence_merge_to_its_whole(bf16):
    """By rows m and l: attention over two sequences of half the tokens each is that over both."""
    drive = Drive(64, layout_of("progressive4", bf16), [500, 700])
    step = drive.step(3, 1.2)
    step.q[H:] = step.q[:H]
    out = progressive(step)
    outs, rows = out.reshape(2, H, 3, 64), step.rows.reshape(2, H, 3, 2)
    merged = merge(outs, rows)
    merged = merged[0] if isinstance(merged, tuple) else merged
    for head in range(H):
        K, V = (np.concatenate([part[:, head] for part in stored]) for stored in (drive.K, drive.V))
        expected = reference.dense(step.q[head].astype(np.float64), K, V)
        assert np.linalg.norm(merged[head] - expected) < 0.05 * np.linalg.norm(expected)


def test_method_on_layout_without_its_data_is_refused():
    drive = Drive(64, "progressive", [100])
    for name in ("sparf", "quest", "top-k-oracle", "h2o"):
        with pytest.raises(ValueError, match="layout: stores keys in 8 bits only: use one with full rows"):
            METHODS[name](drive.step(2))
    with pytest.raises(ValueError, match="layout: stores no low-bit keys and values: use such a layout"):
        METHODS["progressive"](Drive(64, "fp16", [100]).step(2))


def test_ours_is_a_name_for_layout_method_and_budget():
    ours = NAMED["ours"]
    assert METHODS[ours.method] is progressive and ours.layout == "progressive"
    names = {name for name in vars(Arithmetic) if not name.startswith("_")}
    assert {"score", "weigh_pages", "attend_refined", "attend_coarse"} < names
