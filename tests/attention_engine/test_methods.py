"""Every method on a drive's pages: tokens attended, pages fetched, guarantees kept.

partner of: attention_engine/step.py, attention_engine/methods/dense.py, attention_engine/methods/double_sparsity.py,
attention_engine/methods/h2o.py, attention_engine/methods/local.py, attention_engine/methods/oracle.py,
attention_engine/methods/ours.py, attention_engine/methods/quest.py, attention_engine/methods/sparf.py,
attention_engine/methods/twilight.py, attention_engine/pages.py
"""

from dataclasses import replace

import numpy as np
import pytest

from attention_engine import METHODS, Compute, DecodeStep, Queries, Read, reference
from attention_engine.methods.local import SINKS
from attention_engine.methods.quest import choose_pages
from csd_spec import LAYOUTS
from ftl import Ftl

H, D = 2, 16
ON_ROWS = [name for name in METHODS if not name.startswith("progressive")]
EXACT = [name for name in ON_ROWS if not name.startswith("kivi")]  # exact over FP16 rows of the chosen tokens
OWN_BYTES = "double-sparsity", "h2o", "sparf-apart"  # they read more than selected channels and rows
SELECTIVE = [name for name in EXACT if name not in ("dense", "top-k-oracle")]


class Drive:
    """Sequences of random rows in a small drive, and the same as arrays (B, H, S, d)."""

    def __init__(self, spec, lengths, layout="fp16", seed=0, order=None):
        self.generator = np.random.default_rng(seed)
        self.ftl = Ftl(spec)
        form = LAYOUTS[layout].form(spec.geometry.page_bytes, D, 512)
        self.handles = self.ftl.create(len(lengths), 1, H, form)
        self.K, self.V = ([self.rows(S) for S in lengths] for _ in "KV")
        if order is not None:
            self.K, self.V = ([rows[order] for rows in arrays] for arrays in (self.K, self.V))
        self.append(self.K, self.V)
        self.memory = [{} for _ in lengths]

    def rows(self, tokens):
        return self.generator.standard_normal((tokens, H, D)).astype(np.float16)

    def append(self, k, v):
        lengths = np.array([len(rows) for rows in k])
        self.ftl.append(self.handles, 0, lengths, np.concatenate(k), np.concatenate(v), 0)

    def grow(self):
        k, v = ([self.rows(1) for _ in self.handles] for _ in "KV")
        self.append(k, v)
        self.K, self.V = (
            [np.concatenate(pair) for pair in zip(*pairs, strict=True)] for pairs in ((self.K, k), (self.V, v))
        )

    def step(self, G=2, r=4, share=4, q=None):
        view, streams = self.ftl.view(self.handles, 0), len(self.handles) * H
        q = self.generator.standard_normal((streams, G, D)).astype(np.float32) if q is None else q
        k = -(-view.seq_lens // share)
        v_mean = np.concatenate([rows.astype(np.float32).mean(0) for rows in self.V])
        return DecodeStep(view, self.ftl, Queries(q, r, k, -(-k // 4), v_mean, self.memory))

    def stream(self, number):
        """K and V of a stream in float64."""
        return [rows[number // H][:, number % H].astype(np.float64) for rows in (self.K, self.V)]


def fetched_and_useful(step):
    plans = [item.plan for item in step.work if isinstance(item, Read)]
    return sum(int(p.nbytes.sum()) for p in plans), sum(int(p.useful.sum()) for p in plans)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("layout", ["fp16", "int4"])
def test_output_equals_exact_attention_over_chosen_tokens(small_drive, name, layout):
    """Over several steps, of sequences of different lengths, one shorter than a page."""
    drive = Drive(small_drive, [230, 100, 7], layout)
    for _ in range(20):
        drive.grow()
        step = drive.step()
        out = METHODS[name](step)
        tokens, counts = step.chosen
        shared = len(counts) == step.streams
        for stream in range(step.streams):
            K, V = drive.stream(stream)
            for query in range(2):
                row = stream if shared else 2 * stream + query
                chosen = tokens[row, : counts[row]]
                assert (np.diff(chosen) > 0).all()
                assert chosen[-1] < len(K)
                alpha = step.alpha[stream, query]
                q = step.q[stream, query : query + 1].astype(np.float64)
                m, total = reference.dense_rows(q, K[chosen])[0]
                np.testing.assert_allclose(step.rows[stream, query], [m, total / alpha], rtol=1e-4, atol=1e-5)
                expected = reference.dense(q, K[chosen], V[chosen])[0]
                expected = alpha * expected + (1 - alpha) * V.mean(0)
                np.testing.assert_allclose(out[stream, query], expected, rtol=1e-3, atol=1e-4)
        fetched, useful = fetched_and_useful(step)
        assert useful <= fetched


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, "fp16") for name in SELECTIVE if name not in ("double-sparsity", "h2o", "sparf-apart")]
    + [("spending", "int4")],
)
def test_useful_bytes_keep_the_budget(small_drive, name, layout):
    """Within the rounding to whole pages and channels; the queries of a group share fetched pages."""
    drive = Drive(small_drive, [400], layout)
    step = drive.step(share=8)
    METHODS[name](step)
    budget = int(step.budget_bytes.sum())
    slack = step.streams * 2 * step.view.layout.n * 4 * D
    assert fetched_and_useful(step)[1] <= budget + slack


def test_small_budget_keeps_share_for_tokens(small_drive):
    for r, all_channels in ((D // 16, False), (D // 2, True)):
        step = Drive(small_drive, [400], layout="int4").step(r=r, share=32)
        METHODS["spending"](step)
        scored = next(item for item in step.work if isinstance(item, Compute) and item.unit == "logit0")
        assert (scored.lines[0] == D) == all_channels
        assert r < scored.lines[0]
        tokens = next(item for item in step.work if isinstance(item, Compute) and item.unit == "attend")
        assert (tokens.lines > 400 // 64).all()


@pytest.mark.parametrize("name", ["sparf", "sparq", "spending"])
def test_the_whole_budget_is_dense(small_drive, name):
    drive = Drive(small_drive, [150, 40])
    step = drive.step(r=D, share=1)
    np.testing.assert_allclose(METHODS[name](step), METHODS["dense"](drive.step(q=step.q)), rtol=1e-4, atol=1e-5)


def test_oracle_selects_tokens_of_largest_weight(small_drive):
    drive = Drive(small_drive, [300])
    step = drive.step(G=1)
    METHODS["top-k-oracle"](step)
    tokens, counts = step.chosen
    for stream in range(H):
        K, _ = drive.stream(stream)
        best = np.sort(np.argsort(-(K @ step.q[stream, 0]), kind="stable")[: counts[stream]])
        np.testing.assert_array_equal(tokens[stream, : counts[stream]], best)


def test_h2o_evicted_tokens_stay_evicted(small_drive):
    drive = Drive(small_drive, [200])
    survivors = None
    for number in range(30):
        drive.grow()
        step = drive.step(share=4)
        METHODS["h2o"](step)
        tokens, counts = step.chosen
        now = [set(tokens[s, : counts[s]].tolist()) for s in range(H)]
        assert all(200 + number in stream for stream in now)  # the newest
        if survivors is not None:
            assert all(stream - before <= {200 + number} for stream, before in zip(now, survivors, strict=True))
            assert (counts <= step.rows_for(step.budget_bytes)).all()
        survivors = now


def test_quest_selects_page_with_needle(small_drive):
    drive = Drive(small_drive, [400])
    n = drive.ftl.view(drive.handles, 0).layout.n
    q = np.ones((H, 1, D), np.float32)
    drive = Drive(small_drive, [0])
    k = np.zeros((400, H, D), np.float16)
    k[137] = 3
    drive.K, drive.V = [k], [drive.rows(400)]
    drive.append(drive.K, drive.V)
    step = drive.step(q=q, share=16)
    METHODS["quest"](step)
    tokens, counts = step.chosen
    for stream in range(H):
        assert set(range(137 // n * n, 137 // n * n + n)) <= set(tokens[stream, : counts[stream]].tolist())


def test_double_sparsity_keeps_its_channels(small_drive):
    drive = Drive(small_drive, [100])
    METHODS["double-sparsity"](drive.step())
    first = drive.memory[0]["channels"].copy()
    drive.grow()
    METHODS["double-sparsity"](drive.step())
    np.testing.assert_array_equal(drive.memory[0]["channels"], first)


def test_top_p_reads_less_for_concentrated_weights(small_drive):
    drive = Drive(small_drive, [400], layout="int4")
    q = np.concatenate([0.01 * np.ones((1, 1, D)), 3 * drive.K[0][None, 50, 1:2].astype(float)]).astype(np.float32)
    counts = []
    for name in ("paged", "paged-top-p"):
        step = drive.step(q=q, share=2)
        METHODS[name](step)
        counts.append(step.chosen[1])
    assert counts[1][1] < counts[0][1]  # one token has nearly all
    assert (counts[1] <= counts[0]).all()


def test_page_selection_uses_all_fetched_tokens(small_drive):
    drive = Drive(small_drive, [400], layout="int4")
    step = drive.step(share=2)
    METHODS["paged"](step)
    tokens = [item.plan for item in step.work if isinstance(item, Read) and item.unit == "flash_token"]
    for plan in tokens:
        np.testing.assert_array_equal(plan.useful, step.view.layout.n * 2 * D)


def test_separate_selection_counts_fetches_per_query_head(small_drive):
    drive = Drive(small_drive, [300])
    together, apart = drive.step(), drive.step()
    METHODS["sparf"](together)
    apart.q = together.q
    METHODS["sparf-apart"](apart)
    assert fetched_and_useful(apart)[0] > 1.3 * fetched_and_useful(together)[0]


@pytest.mark.parametrize("name", ["dense", "sparf", "spending"])
def test_token_order_changes_pages_not_output(small_drive, name):
    """Rows of K and V are permuted alike, outside the recent window."""
    order = np.concatenate([np.random.default_rng(1).permutation(240), np.arange(240, 300)])
    outs, pages = [], []
    for ordering in (None, order):
        drive = Drive(small_drive, [300], order=ordering)
        step = drive.step(G=1, share=8, q=np.random.default_rng(2).standard_normal((H, 1, D)).astype(np.float32))
        outs.append(METHODS[name](step))
        pages.append(fetched_and_useful(step)[0])
    np.testing.assert_allclose(*outs, rtol=1e-3, atol=1e-5)
    assert name == "dense" or pages[0] != pages[1]


def test_adding_tokens_never_changes_earlier_pages(small_drive):
    drive = Drive(small_drive, [100], layout="int4")
    content = drive.ftl.nand.content
    before = {
        int(p): content[p].copy() for m in drive.ftl.sequence(drive.handles[0]).maps.values() for p in m.flash_slots()
    }
    for _ in range(150):
        drive.grow()
    assert before
    for page, old in before.items():
        np.testing.assert_array_equal(content[page], old)


@pytest.mark.parametrize("name", ON_ROWS)
def test_unfetched_pages_never_change_output(small_drive, name):
    """The same step with every page poisoned except the planned ones; tables were built when rows were appended."""
    outs = []
    for poisoned in (False, True):
        drive = Drive(small_drive, [230, 100])
        METHODS[name](drive.step())  # makes tables
        if poisoned:
            whole = drive.ftl.nand.content.copy()
            if name != "top-k-oracle":  # which knows what it does not read
                drive.ftl.nand.content[:] = 0xFF
            reveal(drive.ftl, whole)
        step = drive.step(q=np.random.default_rng(5).standard_normal((2 * H, 2, D)).astype(np.float32))
        outs.append(METHODS[name](step))
    np.testing.assert_array_equal(*outs)


def reveal(ftl, whole):
    """Make pages show their content once they are planned."""
    for name in ("token_pages", "embedding_pages"):
        plan_of = getattr(ftl, name)

        def plan(*arguments, plan_of=plan_of):
            done = plan_of(*arguments)
            ftl.nand.content[done.ppns] = whole[done.ppns]
            return done

        setattr(ftl, name, plan)


def table_bytes(step):
    return [int(item.plan.useful.sum()) for item in step.work if isinstance(item, Read) and item.unit == "flash_table"]


def test_table_bytes_match_hand_count(small_drive):
    """230 tokens: 14 full pages of 16 tokens on each of 2 heads, d = 16, r = 4."""
    drive = Drive(small_drive, [230])
    step = drive.step(share=2)
    METHODS["quest"](step)
    assert table_bytes(step) == [2 * 14 * 2 * D * 2]  # least and largest of every channel, FP16
    step = drive.step(share=2)
    METHODS["double-sparsity"](step)
    assert table_bytes(step) == [2 * 230 * (4 // 2 + 4)]  # codes of 4 bits, a scale and a least value
    step = drive.step(share=2)
    METHODS["twilight"](step)
    quest = drive.step(share=2, q=step.q)
    METHODS["quest"](quest)
    chosen = int(quest.chosen[1].sum())
    assert table_bytes(step) == [2 * 14 * 2 * D * 2, chosen * (D // 2 + 4)]


def test_local_selects_sinks_and_recent_tokens(small_drive):
    step = Drive(small_drive, [300]).step(share=8)
    METHODS["local"](step)
    tokens, counts = step.chosen
    expected = np.concatenate([np.arange(SINKS), np.arange(300 - counts[0] + SINKS, 300)])
    np.testing.assert_array_equal(tokens[0, : counts[0]], expected)
    assert SINKS == 4


def test_twilight_drops_tokens_of_small_weight(small_drive):
    drive = Drive(small_drive, [400])
    q = np.zeros((H, 1, D), np.float32)
    q[1] = 4 * drive.K[0][50, 1]
    step = drive.step(q=q, share=2)
    METHODS["twilight"](step)
    (_, counts), (_, all_counts) = step.chosen, choose_pages(drive.step(q=q, share=2))
    assert counts[0] >= 0.85 * all_counts[0]  # all tokens weigh the same
    assert counts[1] < 0.2 * all_counts[1]


def test_h2o_keeps_tokens_of_largest_accumulated_weight(small_drive):
    """One old token answers every query: it stays when others go."""
    drive = Drive(small_drive, [0])
    k = np.zeros((200, H, D), np.float16)
    k[60] = 4
    drive.K, drive.V = [k], [drive.rows(200)]
    drive.append(drive.K, drive.V)
    for _ in range(3):
        drive.grow()
        step = drive.step(q=np.ones((H, 2, D), np.float32), share=8)
        METHODS["h2o"](step)
    tokens, counts = step.chosen
    assert all(60 in tokens[stream, : counts[stream]] for stream in range(H))
    assert drive.memory[0]["h2o"][0, 60] > 1


def test_double_sparsity_scores_by_heavy_channels(small_drive):
    drive = Drive(small_drive, [0])
    k = np.full((100, H, D), 0.01, np.float16)
    k[:, :, [2, 5, 7, 11]] = drive.rows(100)[:, :, :4]
    drive.K, drive.V = [k], [drive.rows(100)]
    drive.append(drive.K, drive.V)
    METHODS["double-sparsity"](drive.step(q=np.ones((H, 1, D), np.float32), r=4))
    assert set(drive.memory[0]["channels"][0].tolist()) == {2, 5, 7, 11}


def test_hot_pages_in_dram_change_bytes_not_the_output(small_drive):
    outs, fetched = [], []
    for cache in (0, 40 * small_drive.geometry.page_bytes):
        drive = Drive(replace(small_drive, cache_bytes=cache), [300])
        q = np.random.default_rng(5).standard_normal((H, 2, D)).astype(np.float32)
        METHODS["sparf"](drive.step(q=q))
        step = drive.step(q=q)
        outs.append(METHODS["sparf"](step))
        fetched.append(fetched_and_useful(step)[0])
    np.testing.assert_array_equal(*outs)
    assert fetched[1] < fetched[0]
