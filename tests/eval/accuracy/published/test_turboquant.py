"""TurboQuant and QuaRot's rotation, compared with figures of the paper.

partner of: eval/accuracy/published/hadamard.py
"""

import numpy as np
import pytest

from tests.eval.accuracy.published.random_streams import draw
from vcsd_eval.accuracy.published import hadamard, turboquant
from vcsd_eval.accuracy.published.codes import SEED, gaussian_matrix, random_orthogonal

# arXiv 2504.19874, Theorems 1 and 2: distortion of unit vectors at 1, 2, 3 and 4 bits
MSE = {1: 0.36, 2: 0.117, 3: 0.03, 4: 0.009}
PROD = {1: 1.57, 2: 0.56, 3: 0.18, 4: 0.047}  # times |q|^2 / d


def units(count, d, seed=0):
    rows = np.random.default_rng(seed).standard_normal((count, d)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("bits", MSE)
def test_distortion_is_the_papers(bits):
    rows = units(2000, 256)
    result = np.square(turboquant.coded_mse(rows, bits) - rows).sum(1).mean()
    assert result == pytest.approx(MSE[bits], rel=0.16)  # the paper rounds 0.0345 at 3 bits to 0.03
    spiky = np.eye(256, dtype=np.float32)  # worst-case rows have the same, on average over rows
    assert np.square(turboquant.coded_mse(spiky, bits) - spiky).sum(1).mean() == pytest.approx(MSE[bits], rel=0.16)


@pytest.mark.parametrize("bits", PROD)
def test_product_distortion_is_the_papers(bits):
    rows, q = units(2000, 256), units(200, 256, seed=1)
    errors = turboquant.coded_prod(rows, bits) @ q.T - rows @ q.T
    assert np.square(errors).mean() * 256 == pytest.approx(PROD[bits], rel=0.16)


def test_products_have_no_bias(monkeypatch):
    """Products of a row with itself: too small with TurboQuant_mse, right on average with TurboQuant_prod."""
    row = units(1, 64)
    result = {"mse": [], "prod": []}
    for seed in range(600):
        monkeypatch.setattr(turboquant, "random_orthogonal", lambda d, s=seed: random_orthogonal(d, s))
        monkeypatch.setattr(turboquant, "gaussian_matrix", lambda m, d, _, s=seed: gaussian_matrix(m, d, SEED + s))
        result["mse"].append((turboquant.coded_mse(row, 1) @ row.T).item())
        result["prod"].append((turboquant.coded_prod(row, 2) @ row.T).item())
    deviation = np.std(result["prod"]) / np.sqrt(600)
    assert abs(np.mean(result["prod"]) - 1) < 4 * deviation < 0.03
    assert np.mean(result["mse"]) == pytest.approx(2 / np.pi, abs=0.02)  # section 3.2: the bias at 1 bit


def test_rows_of_zeros_stay_zero():
    rows = np.zeros((2, 64), np.float32)
    assert not turboquant.coded_mse(rows, 2).any()
    assert not turboquant.coded_prod(rows, 2).any()


def test_hadamard_spreads_an_outlier():
    """4 bits of a row with one large channel: the rotation makes the error several times smaller."""
    rows = np.random.default_rng(0).standard_normal((1, 50, 64)).astype(np.float32)
    rows[..., 3] = 60
    plain = hadamard.uniform_in_groups(rows, 4, 2, 128)
    assert np.square(hadamard.coded(rows) - rows).mean() < 0.25 * np.square(plain - rows).mean()


def test_bytes_by_hand():
    seen = draw(n=2, s=300, d=64)
    assert hadamard.code_bytes(seen) == 2 * 296 * 2 * (32 + 4)
    assert turboquant.code_bytes(seen, 3, False) == 2 * 296 * 2 * (24 + 2)
    assert turboquant.code_bytes(seen, 3, True) == 2 * 296 * (2 * (24 + 2) + 2)


def test_hadamard_is_the_looped_quantizer():
    rows = np.random.default_rng(0).standard_normal((1, 5, 8)).astype(np.float32)
    matrix = [[(-1) ** bin(i & j).count("1") / 8**0.5 for j in range(8)] for i in range(8)]
    expected = []
    for row in rows[0].astype(np.float64):
        turned = [sum(row[i] * matrix[i][j] for i in range(8)) for j in range(8)]
        low = 0.95 * min(turned)
        scale = (0.95 * max(turned) - low) / 15
        codes = [min(max(round((value - low) / scale), 0), 15) for value in turned]
        expected.append([sum((low + scale * codes[j]) * matrix[i][j] for j in range(8)) for i in range(8)])
    np.testing.assert_allclose(hadamard.coded(rows)[0], expected, atol=4e-3)
