"""Caps, sinks, slopes and scales in every method, against float64; a term without effect changes no bit."""

from dataclasses import replace

import numpy as np
import pytest

from attention_engine import METHODS, DecodeStep, Queries, reference
from csd_spec import LAYOUTS
from ftl import Ftl

H, G, D = 2, 3, 16
LENGTHS = (230, 100, 7)
ON_ROWS = [name for name in METHODS if not name.startswith("progressive")]
EXACT = [name for name in ON_ROWS if not name.startswith("kivi")]
SCALE = np.float32(1 / np.sqrt(D))
NOTHING = (SCALE, np.inf, -np.inf, 0.0)
KINDS = {
    "scale": (0.4, np.inf, -np.inf, 0.0),
    "cap": (SCALE, 1.5, -np.inf, 0.0),
    "sink": (SCALE, np.inf, 2.0, 0.0),
    "slope": (SCALE, np.inf, -np.inf, 0.05),
    "all": (0.4, 2.0, 1.0, 0.02),
}


class Drive:
    """Sequences of random rows in a small drive, and the same as arrays."""

    def __init__(self, spec, seed, layout="fp16"):
        self.generator = np.random.default_rng(seed)
        self.ftl = Ftl(spec)
        page_bytes = spec.geometry.page_bytes
        form = LAYOUTS[layout].form(page_bytes, D, 512)
        self.handles = self.ftl.create(len(LENGTHS), 1, H, form)
        self.K, self.V = ([self.generator.standard_normal((S, H, D)).astype(np.float16) for S in LENGTHS] for _ in "KV")
        lengths = np.array(LENGTHS)
        self.ftl.append(self.handles, 0, lengths, np.concatenate(self.K), np.concatenate(self.V), 0)
        self.q = self.generator.standard_normal((len(LENGTHS) * H, G, D)).astype(np.float32)

    def step(self, terms):
        view = self.ftl.view(self.handles, 0)
        k = -(-view.seq_lens // 4)
        v_mean = np.concatenate([rows.astype(np.float32).mean(0) for rows in self.V])
        queries = Queries(self.q, 4, k, -(-k // 4), v_mean, [{} for _ in LENGTHS])
        return DecodeStep(view, self.ftl, replace(queries, terms=terms))

    def stream(self, number):
        return [rows[number // H][:, number % H].astype(np.float64) for rows in (self.K, self.V)]


def terms_of(values, spread=0.3):
    """(H, G, 4), other for every head."""
    terms = np.tile(np.array(values, np.float32), (H, G, 1))
    return terms * np.linspace(1 - spread, 1 + spread, H * G, dtype=np.float32).reshape(H, G, 1)


@pytest.mark.parametrize("name", METHODS)
def test_neutral_terms_change_no_bit(small_drive, name):
    layout = "fp16" if name in ON_ROWS else "progressive-exact"
    plain, said = Drive(small_drive, 0, layout).step(None), Drive(small_drive, 0, layout).step(terms_of(NOTHING, 0))
    np.testing.assert_array_equal(METHODS[name](plain), METHODS[name](said))
    np.testing.assert_array_equal(plain.rows, said.rows)
    np.testing.assert_array_equal(plain.alpha, said.alpha)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EXACT)
def test_output_with_terms_equals_exact_over_chosen(small_drive, name, kind):
    """Tokens that are not chosen count as the mean of V with their approximate weight; then the sink takes its share of
    all.
    """
    for seed in range(3):
        drive, terms = Drive(small_drive, seed), terms_of(KINDS[kind])
        step = drive.step(terms)
        out, (tokens, counts) = METHODS[name](step), step.chosen
        per_stream = np.tile(terms.astype(np.float64), (len(LENGTHS), 1, 1))
        for stream in range(step.streams):
            (K, V), length = drive.stream(stream), len(drive.stream(stream)[0])
            for query in range(G):
                row = stream if len(counts) == step.streams else G * stream + query
                chosen, own = tokens[row, : counts[row]], per_stream[stream, query : query + 1]
                alpha, q = float(step.alpha[stream, query]), drive.q[stream, query].astype(np.float64)
                logits = reference.apply_logit_terms_reference(
                    own[:, :1] * (q @ K[chosen].T)[None], own, chosen, length
                )[0]
                weights = np.exp(logits - logits.max())
                mixed = alpha * (weights @ V[chosen]) / weights.sum() + (1 - alpha) * V.mean(0)
                whole = weights.sum() / alpha
                expected = mixed * whole / (whole + np.exp(own[0, 2] - logits.max()))
                np.testing.assert_allclose(out[stream, query], expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dense", "sparf", "sparq"])
def test_whole_outputs_against_the_oracle(small_drive, name, kind):
    drive, terms = Drive(small_drive, 7), terms_of(KINDS[kind])
    step = drive.step(terms)
    out = METHODS[name](step)
    for stream in range(step.streams):
        (K, V), own = drive.stream(stream), terms[stream % H].astype(np.float64)
        q, k = drive.q[stream].astype(np.float64), int(step.top_k[stream])
        if name == "dense":
            expected = reference.dense(q, K, V, own)
        else:
            expected, _, chosen = reference.sparf(q, K, V, 4, k, -(-k // 4), own)
            np.testing.assert_array_equal(step.chosen[0][stream, :k], chosen)
        np.testing.assert_allclose(out[stream], expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["kivi", "progressive"])
def test_low_bit_error_with_terms_is_similar(small_drive, name, kind):
    layout = "fp16" if name in ON_ROWS else "progressive4-exact"
    errors = []
    for terms in (terms_of(NOTHING, 0), terms_of(KINDS[kind])):
        drive = Drive(small_drive, 3, layout)
        out = METHODS[name](drive.step(terms))
        expected = [
            reference.dense(drive.q[s].astype(np.float64), *drive.stream(s), terms[s % H].astype(np.float64))
            for s in range(len(LENGTHS) * H)
        ]
        errors.append(np.abs(out - np.stack(expected)).mean())
    assert errors[1] < 2.5 * errors[0]


def test_rows_of_parts_with_one_sink_merge_to_the_whole(small_drive):
    """The sink is counted in the weight of an output: one part has it, and the whole has it once."""
    terms = terms_of(KINDS["sink"], 0)
    step = Drive(small_drive, 5).step(terms)
    METHODS["dense"](step)
    plain = Drive(small_drive, 5).step(terms_of(NOTHING, 0))
    METHODS["dense"](plain)
    sums = [np.log(part.rows[..., 1]) + part.rows[..., 0] for part in (step, plain)]
    expected = np.logaddexp(sums[1], np.tile(terms[:, :, 2], (len(LENGTHS), 1)))
    np.testing.assert_allclose(sums[0], expected, rtol=1e-5)


def test_a_sink_and_a_cap_take_time_in_the_softmax(small_drive):
    scores = []
    for values in (NOTHING, KINDS["cap"], KINDS["sink"]):
        step = Drive(small_drive, 0).step(terms_of(values, 0))
        METHODS["dense"](step)
        scores.append(next(int(item.scores.sum()) for item in step.work if getattr(item, "unit", "") == "logit"))
    plain, capped, sunk = scores
    assert capped == 2 * plain
    assert sunk == plain + len(LENGTHS) * H
