"""Softmax rows returned with the output of an `Attend`: computed for a method, or set by the method itself."""

from dataclasses import replace

import numpy as np
import pytest

from attention_engine import METHODS, reference
from csd_spec import Attend, Status
from tests.csd_firmware.test_step import Bench, D, G, H, half

LENGTHS = [150, 0, 37]


def means(step):
    """An output that no `attend` has made."""
    return np.repeat(step.v_mean[:, None], step.queries, axis=1)


def weighed(step):
    step.rows = np.broadcast_to(np.array([3, 7], np.float64), step.rows.shape)
    return means(step)


def misshapen(step):
    step.rows = step.rows[:, :, :1]
    return means(step)


def by_query(step):
    apart = step.apart()
    return apart.attend(apart.everything(), apart.seq_lens).reshape(step.q.shape)


MINE = METHODS | {"means": means, "weighed": weighed, "misshapen": misshapen, "by-query": by_query}


@pytest.mark.parametrize("method", ["dense", "sparf", "by-query"])
def test_rows_equal_oracle(small_drive, method):
    bench = Bench(small_drive, LENGTHS, methods=MINE)
    sent = []
    step = bench.firmware.step
    bench.firmware.step = lambda command, now_ns: (sent.append(command), step(command, now_ns))[1]
    for _ in range(20):
        done, _ = bench.attend(method)
        rows, command = done.data[1], sent[-1]
        assert (rows.shape, rows.dtype, rows.flags.c_contiguous) == ((3, H, G, 2), np.float32, True)
        for b, h in np.ndindex(3, H):
            q, K = command.q[b, h].astype(np.float64), bench.K[b][:, h].astype(np.float64)
            k, recent = int(command.top_k[b]), int(command.recent[b])
            wanted = reference.sparf_rows(q, K, 4, k, recent) if method == "sparf" else reference.dense_rows(q, K)
            np.testing.assert_allclose(rows[b, h], wanted, rtol=1e-4, atol=1e-5)


def test_custom_method_returns_weight_of_its_output(small_drive):
    for method, expected in (("means", [0, 0]), ("weighed", [3, 7])):
        done, _ = Bench(small_drive, LENGTHS, methods=MINE).attend(method)
        np.testing.assert_array_equal(done.data[1], np.broadcast_to(np.float32(expected), (3, H, G, 2)))


def test_method_rows_of_wrong_shape_are_an_error(small_drive):
    bench = Bench(small_drive, [20], methods=MINE)
    q, k, one = half(bench.generator, 1, H, G, D), half(bench.generator, 1, H, D), np.array([1])
    done = bench.firmware.step(Attend(bench.seqs, 1, q, k, k, "misshapen", 4, one, one), 0)
    assert done.status is Status.INVALID_FIELD
    assert done.reason.startswith("method misshapen: ValueError")
    assert bench.firmware.ftl.sequence(bench.seqs[0]).lengths.tolist() == [0, 20]


TERMS = np.tile(np.array([0.3, 1.5, 0.5, 0.01], np.float32), (H, G, 1))


def test_terms_of_command_equal_oracle(small_drive):
    """Also in what they add to its bytes."""
    bench, sent = Bench(small_drive, LENGTHS), []
    step = bench.firmware.step

    def told(command, now_ns):
        sent.append(replace(command, terms=TERMS))
        return step(sent[-1], now_ns)

    bench.firmware.step = told
    done, _ = bench.attend("dense")
    plain, _ = Bench(small_drive, LENGTHS).attend("dense")
    assert done.link_bytes == plain.link_bytes + TERMS.nbytes
    for b, h in np.ndindex(3, H):
        args = (array.astype(np.float64) for array in (sent[-1].q[b, h], bench.K[b][:, h], bench.V[b][:, h], TERMS[h]))
        np.testing.assert_allclose(done.data[0][b, h], reference.dense(*args), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("column", "value"), [(0, np.inf), (0, np.nan), (1, 0), (1, -3), (2, np.inf), (2, np.nan), (3, np.nan), (3, np.inf)]
)
def test_invalid_terms_are_refused(small_drive, column, value):
    bench, terms = Bench(small_drive, [20]), TERMS.copy()
    terms[1, 0, column] = value
    step, before = bench.firmware.step, bench.state()
    bench.firmware.step = lambda command, now_ns: step(replace(command, terms=terms), now_ns)
    with pytest.raises(AssertionError, match="terms: "):
        bench.attend("dense")
    assert bench.state()[0] == before[0]


def test_terms_of_wrong_shape_are_refused(small_drive):
    bench = Bench(small_drive, [20])
    step = bench.firmware.step
    bench.firmware.step = lambda command, now_ns: step(replace(command, terms=TERMS[:1]), now_ns)
    with pytest.raises(AssertionError, match="must have shape"):
        bench.attend("dense")
