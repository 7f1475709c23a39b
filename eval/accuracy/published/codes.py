"""Building blocks of quantizers: uniform codes, rotations, Lloyd-Max codebooks."""

from __future__ import annotations

from functools import cache

import numpy as np

from csd_spec.arrays import F32, F64, I64

HALF_MAX = np.float32(65504)  # largest finite FP16 value
SCALE_BYTES = 4  # a scale and a zero point in FP16
SEED = 20240513


def to_half(values: F32) -> F32:
    """Round to FP16; values beyond its range become its largest value."""
    rounded: F32 = values.clip(-HALF_MAX, HALF_MAX).astype(np.float16).astype(np.float32)
    return rounded


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of `count` codes of `bits` bits, packed."""
    return -(-count * bits // 8)


def uniform(rows: F32, bits: int, axis: int, clip: float = 1.0) -> F32:
    """Quantize asymmetrically with one FP16 scale and zero point along an axis, and dequantize.

    Args:
        rows: Any shape.
        bits: Bits of a code.
        axis: Axis whose elements share a scale.
        clip: Factor on the largest and the smallest value.

    Returns:
        Dequantized values, same shape.
    """
    levels = np.float32((1 << bits) - 1)
    low = to_half(rows.min(axis, keepdims=True) * np.float32(clip))
    scale = to_half((rows.max(axis, keepdims=True) * np.float32(clip) - low) / levels)
    code = np.rint(np.divide(rows - low, scale, out=np.zeros_like(rows), where=scale > 0)).clip(0, levels)
    made: F32 = low + scale * code
    return made


def uniform_in_groups(rows: F32, bits: int, axis: int, size: int, clip: float = 1.0) -> F32:
    """`uniform` in groups of `size` consecutive elements of an axis; the last group may be shorter.

    Args:
        rows: (N, T, d).
        bits: Bits of a code.
        axis: 1 for groups of tokens by channel, 2 for groups of channels by token.
        size: Elements of a group.
        clip: Factor on the largest and the smallest value of a group.
    """
    length = rows.shape[axis]
    whole = length - length % size
    moved = np.moveaxis(rows, axis, -1)
    folded = moved[..., :whole].reshape(*moved.shape[:-1], whole // size, size)
    parts = [uniform(folded, bits, -1, clip).reshape(*moved.shape[:-1], whole)]
    if whole < length:
        parts.append(uniform(moved[..., whole:], bits, -1, clip))
    return np.ascontiguousarray(np.moveaxis(np.concatenate(parts, -1), -1, axis))


@cache
def random_orthogonal(d: int, seed: int = SEED) -> F32:
    """Orthogonal matrix (d, d) drawn uniformly (Haar): QR of a Gaussian matrix with the signs of R's diagonal."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))
    return (q * np.sign(np.diag(r))).astype(np.float32)


@cache
def gaussian_matrix(rows: int, d: int, seed: int = SEED) -> F32:
    """Matrix (rows, d) of independent standard normal entries."""
    return np.random.default_rng(seed).standard_normal((rows, d), dtype=np.float32)


@cache
def hadamard(d: int) -> F32:
    """Orthogonal Hadamard matrix (d, d).

    If d is not a power of two, the matrix is block diagonal with the largest power of two that divides d: 96 channels
    are three blocks of 32.
    """
    block = d & -d
    h = np.ones((1, 1), np.float32)
    while len(h) < block:
        h = np.block([[h, h], [h, -h]])
    return np.kron(np.eye(d // block, dtype=np.float32), h) / np.float32(np.sqrt(block))


@cache
def random_hadamard(d: int, seed: int = SEED) -> F32:
    """`hadamard` of random signs, (d, d): rows are multiplied from the right."""
    signs = np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), d)
    return signs[:, None] * hadamard(d)


def lloyd_max(x: F64, density: F64, levels: int, iterations: int = 2000) -> F64:
    """Lloyd-Max codebook of a density on a grid.

    Args:
        x: Grid, ascending, (M,).
        density: Density at the grid points, any scale, (M,).
        levels: Codebook size.
        iterations: Upper bound; ends earlier once the codebook no longer moves.

    Returns:
        Codebook, ascending, (levels,) float64.
    """
    mass = np.concatenate([[0.0], np.cumsum(density)])
    moment = np.concatenate([[0.0], np.cumsum(density * x)])
    quantiles = (np.arange(levels) + 0.5) / levels * mass[-1]
    book: F64 = x[np.searchsorted(mass[1:], quantiles).clip(0, len(x) - 1)]
    for _ in range(iterations):
        edges = np.searchsorted(x, (book[1:] + book[:-1]) / 2)
        cells = np.concatenate([[0], edges, [len(x)]])
        weight = np.diff(mass[cells])
        moved = np.divide(np.diff(moment[cells]), weight, out=book.copy(), where=weight > 0)
        if np.abs(moved - book).max() < 1e-9:
            break
        book = moved
    return book


@cache
def sphere_codebook(d: int, levels: int, positive: bool = False) -> F32:
    """Lloyd-Max codebook of one coordinate of a uniformly distributed unit vector of d channels.

    The density is proportional to (1 - x^2)^((d - 3) / 2): TurboQuant, Lemma 1.

    Args:
        d: Channels, at least 3.
        levels: Codebook size.
        positive: Whether only the magnitude of the coordinate is coded.

    Returns:
        (levels,) float32, ascending.
    """
    reach = min(1.0, 9 / np.sqrt(d))
    points = 100_000
    x = (np.arange(points) + 0.5) / points * reach
    x = x if positive else np.concatenate([-x[::-1], x])
    return lloyd_max(x, (1 - x * x) ** ((d - 3) / 2), levels).astype(np.float32)


def nearest(values: F32, book: F32) -> F32:
    """Replace values by the nearest entries of an ascending codebook."""
    return book[np.searchsorted((book[1:] + book[:-1]) / 2, values)]


def cluster_sums(rows: F32, assigned: I64, count: int) -> tuple[F32, I64]:
    """Sum the rows of each cluster.

    Args:
        rows: (T, d).
        assigned: Cluster of each row, (T,).
        count: Number of clusters.

    Returns:
        Sums, (count, d), 0 for a cluster without rows, and numbers of rows, (count,).
    """
    sizes = np.bincount(assigned, minlength=count)
    used = np.flatnonzero(sizes)
    starts = np.cumsum(sizes[used]) - sizes[used]
    sums = np.zeros((count, rows.shape[1]), np.float32)
    sums[used] = np.add.reduceat(rows[np.argsort(assigned, kind="stable")], starts, axis=0)
    return sums, sizes
