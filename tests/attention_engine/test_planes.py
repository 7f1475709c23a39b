"""Scores straight from planes, K and V in 8 bits attended, and the method that does both.

partner of: attention_engine/planes.py, attention_engine/_nibbles.py, attention_engine/methods/progressive.py
"""

import subprocess
import sys

import numpy as np
import pytest

from attention_engine import METHODS, Compute, Queries, Read, Step, reference, to_half
from attention_engine._nibbles import LARGEST
from attention_engine.planes import score
from attention_engine.values import widen
from csd_spec import LAYOUTS, NAMED, Compression
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from csd_spec.view import in_flash
from ftl import Ftl
from ftl.kv.layouts.codes import scored, widened

H = 2
LARGE = np.float32(2.0**40)  # of K and V in BF16, and what q is divided by there
KINDS = pytest.mark.parametrize("bf16", [False, True])


def drive(d, layout, tokens, seed=0, alone=0):
    """A sequence of one layer, its last `alone` tokens one at a time; K and V as stored (S, H, d)."""
    generator, ftl = np.random.default_rng(seed), Ftl(INSTCSD_ZYNQ7045_8CH)
    form = LAYOUTS[layout].form(4096, d, 2048)
    (handle,) = ftl.create(1, 1, H, form)
    k, v = (generator.standard_normal((tokens, H, d)) * np.exp(generator.standard_normal(d) / 2) for _ in range(2))
    size = LARGE if form.bf16 else np.float32(1)
    k, v = (to_half(size * rows.astype(np.float32), form.bf16) for rows in (k, v))
    for first, last in ((0, tokens - alone), *((t, t + 1) for t in range(tokens - alone, tokens))):
        ftl.append([handle], 0, np.array([last - first]), k[first:last], v[first:last], 0)
    return ftl, handle, *(widen(rows, form.bf16).astype(np.float64) for rows in ftl.read_back(handle, 0)[:2])


def step_of(ftl, handle, V, G, c=4.0, seed=1):
    view, d = ftl.view([handle], 0), V.shape[2]
    q = np.random.default_rng(seed).standard_normal((H, G, d)).astype(np.float32)
    q /= LARGE if view.layout.bf16 else 1
    return Step(view, ftl, Queries.alike(q, Compression(c, "bytes").at(len(V), d), V.mean(0).astype(np.float32), [{}]))


def logits_of_codes(step, K):
    """What the codes of full groups say, in float64; exact logits behind them."""
    form, d = step.view.layout.planes, step.head_dim
    slots, out = step.view.planes["scores"], np.einsum("hgd,shd->hgs", step.q.astype(np.float64), K)
    full = int(in_flash(slots[0, 0]).sum())
    for head in range(H if full else 0):
        pages = [
            scored(step.view.banks[0][part[:full]].view(np.uint8), form).reshape(-1, form.m) for part in slots[head]
        ]
        out[head, :, : full * form.T] = step.q[head].astype(np.float64) @ np.concatenate(pages, 1)[:, :d].T
    return out / np.sqrt(d), full * form.T


def rounding(step):
    """Of each full group, (H, G, groups): the most that rounding adds to a logit, and what it adds at random."""
    form, q = step.view.layout.planes, step.q.astype(np.float64) / np.sqrt(step.head_dim)
    slots = step.view.planes["scores"]
    full = int(in_flash(slots[0, 0]).sum())
    most, square = np.zeros((2, H, step.queries, full))
    for head, part, group in np.ndindex(H, slots.shape[1], full):
        page = step.view.banks[0][slots[head, part, group]]
        widths = page.view(np.uint8)[4 * form.m : 5 * form.m]
        mine = q[head, :, part * form.m : (part + 1) * form.m]
        scaled = mine * widened(page[: form.m], form.bf16).astype(float)[: mine.shape[1]]
        added = np.concatenate(
            [scaled[:, [c]] * 2.0 ** np.arange(width) for c, width in enumerate(widths[: mine.shape[1]])], 1
        )
        rows = np.pad(np.abs(added), ((0, 0), (0, -added.shape[1] % 4))).reshape(step.queries, -1, 4)
        unit = rows.sum(2).max(1) / LARGEST
        most[head, :, group] += unit * added.shape[1] / 2
        square[head, :, group] += unit**2 * added.shape[1] / 24  # half of the bits are set
    return most, np.sqrt(square)


@pytest.mark.parametrize(
    ("d", "G", "bits", "tokens"),
    [(64, 1, 2, 700), (64, 4, 2, 500), (128, 5, 3, 300), (80, 2, 4, 200), (256, 8, 2, 230)],
)
@KINDS
def test_scores_are_what_the_codes_say(d, G, bits, tokens, bf16):
    """Within the rounding of what planes add, half a unit each; tokens without codes are exact."""
    ftl, handle, K, V = drive(d, f"planes{bits}{'-bf16' * bf16}", tokens)
    step = step_of(ftl, handle, V, G)
    got, (expected, held) = step.score(), logits_of_codes(step, K)
    assert held > 0
    bound, typical = rounding(step)
    error = np.abs(got - expected)[..., :held].reshape(H, G, -1, step.view.layout.planes.T)
    assert (error <= bound[..., None] + 1e-5).all()
    assert np.sqrt((error**2).mean()) <= 1.5 * np.sqrt((typical**2).mean())
    np.testing.assert_array_equal(got, score(step.view, step.q, threads=3))


@pytest.mark.parametrize("d", [64, 576])
def test_latent_scores_are_what_the_codes_say(d):
    ftl, handle, K, V = drive(d, "planes2-latent", 500)
    step = step_of(ftl, handle, V, 5)
    got, (expected, held) = step.score(), logits_of_codes(step, K)
    bound, _ = rounding(step)
    error = np.abs(got - expected)[..., :held].reshape(H, 5, -1, step.view.layout.planes.T)
    assert held > 0 and (error <= bound[..., None] + 1e-5).all()


@KINDS
def test_tokens_without_codes_have_exact_scores(bf16):
    ftl, handle, K, V = drive(64, f"planes2{'-bf16' * bf16}", 200)
    step = step_of(ftl, handle, V, 2)
    assert (step.unscored == 200).all()
    exact = np.einsum("hgd,shd->hgs", step.q.astype(np.float64), K) / 8
    np.testing.assert_allclose(step.score(), exact, rtol=1e-5, atol=1e-5)


def test_without_byte_shuffles_the_bits_are_the_same():
    """The kernel of a processor that has none, in a process of its own, and four queries at once as one by one."""
    code = """
import sys
import numpy as np
import attention_engine._nibbles as nibbles
nibbles._SHUFFLES = sys.argv[1] == "1" and nibbles._SHUFFLES
from numba import njit
at = njit(lambda array: np.uint64(array.ctypes.data))
@njit
def fill(tables, entries, rows):
    return nibbles.fill_tables(at(tables), at(entries), rows)
@njit
def add(out, tables, codes, rows, numbers):
    o, step = at(out), np.uint64(128)
    places = o, o + step, o + np.uint64(2) * step, o + np.uint64(3) * step
    nibbles.add_entries(places, at(tables), at(codes), rows, 48, numbers)
@njit
def add_one(out, tables, codes, rows, query, unit, offset):
    place = (at(out) + np.uint64(128 * query),)
    nibbles.add_entries(place, at(tables) + np.uint64(16 * query), at(codes), rows, 48, ((unit,), (offset,)))
generator, rows = np.random.default_rng(0), 9
entries = generator.standard_normal((rows, 4, 4)).astype(np.float32) * np.exp(generator.standard_normal((rows, 1, 1)))
entries[:, :, 3] = 0  # a query of zeros
entries = entries.astype(np.float32)
tables, codes = np.empty((rows, 4, 16), np.uint8), generator.integers(0, 256, rows * 48, np.uint8)
units, zeros = (np.array(part, np.float32) for part in fill(tables, entries, rows))
assert np.allclose(units[:3], abs(entries).sum(1).max(0)[:3] / nibbles.LARGEST) and units[3] == 0
whole = np.rint(entries / np.where(units, units, 1)).astype(int)
assert (zeros == -np.minimum(whole, 0).sum((0, 1))).all() and abs(whole).sum(1).max() <= 255
out, single = np.ones((4, 32), np.float32), np.ones((4, 32), np.float32)
offsets = (units * -zeros).astype(np.float32)
add(out, tables, codes, rows, (tuple(units), tuple(offsets)))
for query in range(4):
    add_one(single, tables, codes, rows, query, units[query], offsets[query])
nibble = np.concatenate([codes.reshape(rows, 48)[:, :16] & 15, codes.reshape(rows, 48)[:, :16] >> 4], 1)
sums = sum((nibble[:, None] >> j & 1) * whole[:, j, :, None] for j in range(4)).sum(0)
np.testing.assert_array_equal(out, single)
np.testing.assert_allclose(out, 1 + units[:, None] * sums, rtol=1e-5, atol=1e-5)
"""
    for shuffles in "10":
        subprocess.run([sys.executable, "-c", code, shuffles], check=True)


@KINDS
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("tokens", "alone"), [(61, 0), (500, 30), (31 * 8, 3)])
def test_dense_attends_to_what_is_stored(tokens, alone, exact, bf16):
    dense_attends(64, f"planes2{'-bf16' * bf16}{'-exact' * exact}", tokens, alone)


@KINDS
@pytest.mark.parametrize(("d", "tokens"), [(64, 300), (144, 100), (576, 80)])
def test_where_v_is_a_part_of_k_it_is_read_with_it(d, tokens, bf16):
    """And a token costs one row of 8 bits."""
    step = dense_attends(d, f"planes2{'-bf16' * bf16}-latent", tokens, 5)
    (read,) = (item.plan for item in step.work if isinstance(item, Read))
    n = step.view.layout.n
    assert n == 4096 // d - 1 and read.ppns.size == H * (tokens // n)
    assert int(read.useful.sum()) == H * (tokens // n * n) * d


def dense_attends(d, layout, tokens, alone):
    ftl, handle, K, V = drive(d, layout, tokens, alone=alone)
    step = step_of(ftl, handle, V, 2)
    out = METHODS["dense"](step)
    for head in range(H):
        expected = reference.dense(step.q[head].astype(np.float64), K[:, head], V[:, head])
        np.testing.assert_allclose(out[head], expected, atol=2e-6 * np.abs(V).max())
    return step


@KINDS
@pytest.mark.parametrize("latent", [False, True])
def test_progressive_attends_to_the_groups_that_it_chooses(latent, bf16):
    """Exactly, and the mean of V of the others takes the share that the scores give them; nothing else is fetched."""
    ftl, handle, K, V = drive(64, f"planes2{'-bf16' * bf16}{'-latent' * latent}", 1500, alone=5)
    step = step_of(ftl, handle, V, 2)
    scores, weights = step.score(), None
    weights = np.exp(scores - scores.max(-1, keepdims=True)).astype(np.float64)
    weights /= weights.sum(-1, keepdims=True)
    step = step_of(ftl, handle, V, 2)
    out = METHODS["progressive"](step)
    tokens, counts = step.chosen
    n = step.view.layout.n
    for head in range(H):
        chosen = tokens[head, : counts[head]]
        groups = np.unique(chosen // n)
        assert (chosen == np.concatenate([np.arange(g * n, min((g + 1) * n, 1500)) for g in groups])).all(), "whole"
        others = np.setdiff1d(np.arange(1500), chosen)
        alpha = weights[head][:, chosen].sum(1, keepdims=True)
        exact = reference.dense(step.q[head].astype(np.float64), K[chosen, head], V[chosen, head])
        expected = alpha * exact + (1 - alpha) * V[others, head].mean(0)
        np.testing.assert_allclose(out[head], expected, atol=2e-5 * np.abs(V).max())
    assert (step.fetched_bytes <= step.budget_bytes).all()
    read = [item for item in step.work if isinstance(item, Read)]
    assert [item.unit for item in read] == ["flash_embed", "flash_token"]
    assert sum(isinstance(item, Compute) and item.queries == 1 for item in step.work) == 1, (
        "sums of V are an extra query"
    )


def test_what_was_not_chosen_does_not_matter():
    """Every refined page that was not fetched is poisoned: not a bit changes."""
    ftl, handle, _, V = drive(64, "planes2", 1200)
    out = METHODS["progressive"](step := step_of(ftl, handle, V, 2))
    fetched = next(item.plan.ppns for item in step.work if isinstance(item, Read) and item.unit == "flash_token")
    pages = step.view.planes["refined"][:, 0]
    poisoned = np.setdiff1d(pages[in_flash(pages)], fetched)
    assert poisoned.size
    ftl.nand.content[poisoned] = 0x7F
    np.testing.assert_array_equal(METHODS["progressive"](step_of(ftl, handle, V, 2)), out)


def test_more_budget_errs_less():
    ftl, handle, K, V = drive(128, "planes3-exact", 900)
    errors = []
    for c in (8.0, 4.0, 2.5):
        step = step_of(ftl, handle, V, 4, c)
        out = METHODS["progressive"](step)
        expected = np.stack([reference.dense(step.q[h].astype(np.float64), K[:, h], V[:, h]) for h in range(H)])
        errors.append(np.linalg.norm(out - expected))
    assert errors[0] > errors[1] > errors[2]


def test_a_method_that_needs_what_is_not_there_says_so():
    ftl, handle, _, V = drive(64, "planes2", 100)
    for name in ("sparf", "quest", "top-k-oracle", "h2o"):
        with pytest.raises(ValueError, match="K is kept in 8 bits only"):
            METHODS[name](step_of(ftl, handle, V, 2))
    ftl, handle, _, V = drive(64, "fp16", 100)
    with pytest.raises(ValueError, match="no planes"):
        METHODS["progressive"](step_of(ftl, handle, V, 2))


def test_ours_is_a_name_for_layout_method_and_budget():
    ours = NAMED["ours"]
    assert ours.method in METHODS and ours.layout == "planes2"
