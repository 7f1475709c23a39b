"""Test helpers for low-bit layouts: sequences, decode steps over them, and their pages decoded in float64."""

from __future__ import annotations

import numpy as np

from attention_engine import DecodeStep, Queries, Read, to_half
from attention_engine.values import widen
from csd_spec import LAYOUTS, CompressionBudget
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from csd_spec.view import BANK_SHIFT, UNMAPPED
from ftl import Ftl
from ftl.kv.layouts.coarse import decode_scores, decode_values
from ftl.kv.layouts.codes import to_fp32

H = 2
LARGE = np.float32(2.0**40)  # factor on keys and values in BF16; q is divided by it


class Drive:
    """Sequences of one layer; the last `alone` tokens of each are appended one at a time.

    K and V hold the stored rows, `came` the rows of V before encoding; (S, H, d) each. small: number of first tokens,
    whose V is a hundredth as large.
    """

    def __init__(self, d, layout, lengths, seed=0, alone=0, small=0):
        generator, self.ftl, self.d = np.random.default_rng(seed), Ftl(INSTCSD_ZYNQ7045_8CH), d
        self.form, self.K, self.V, self.came = LAYOUTS[layout].form(4096, d, 2048), [], [], []
        size, spread = LARGE if self.form.bf16 else np.float32(1), np.exp(generator.standard_normal((2, d)) / 2)
        self.handles = self.ftl.create(len(lengths), 1, H, self.form)
        for handle, tokens in zip(self.handles, lengths, strict=True):
            k, v = (generator.standard_normal((tokens, H, d)) * offset + offset[::-1] / 3 for offset in spread)
            v[:small] /= 100
            k, v = (to_half(size * rows.astype(np.float32), self.form.bf16) for rows in (k, v))
            for first, last in ((0, tokens - alone), *((t, t + 1) for t in range(tokens - alone, tokens))):
                self.ftl.append([handle], 0, np.array([last - first]), k[first:last], v[first:last], 0)
            self._take(handle)
            self.came.append(widen(v, self.form.bf16).astype(np.float64))

    def _take(self, handle):
        rows = self.ftl.read_back(handle, 0)[:2]
        for array, stored in zip((self.K, self.V), rows, strict=True):
            array.append(widen(stored, self.form.bf16).astype(np.float64))

    def crop(self, length):
        """Crop the only sequence."""
        self.ftl.crop(self.handles[0], 0, length, 0)
        self.K, self.V = [], []
        self._take(self.handles[0])

    def step(self, G, c=4.0, seed=1, threads=1, sharp=1.0, terms=None):
        """A step with random queries and a budget of 1 / c; sharp: of the queries, so that some tokens weigh more."""
        view = self.ftl.view(self.handles, 0)
        q = np.random.default_rng(seed).standard_normal((len(self.handles) * H, G, self.d)).astype(np.float32)
        q *= np.float32(sharp) / (LARGE if self.form.bf16 else 1)
        v_mean = np.concatenate([rows.mean(0) for rows in self.V]).astype(np.float32)
        params = [CompressionBudget(c, "bytes").at(len(rows), self.d) for rows in self.V]
        top_k, recent = (np.repeat([getattr(one, name) for one in params], H) for name in ("k", "l"))
        queries = Queries(q, params[0].r, top_k, recent, v_mean, [{} for _ in params], terms)
        return DecodeStep(view, self.ftl, queries, threads)

    def stream(self, number):
        """K and V of a stream, (S, d) each."""
        return [rows[number // H][:, number % H] for rows in (self.K, self.V)]


def pages_of(step, name, stream):
    """Number and pages, (parts, page bytes), of each group of a stream that has pages."""
    slots = step.view.maps[name][stream]
    for group in np.flatnonzero(slots[0] != UNMAPPED):
        pages = [step.view.banks[slot >> BANK_SHIFT][slot & 0x7FFFFFFF] for slot in slots[:, group]]
        yield group, np.array(pages).view(np.uint8)


def in_few_bits(step, name, stream):
    """K (scores) or V (values) of a stream decoded from its codes, (S, d); NaN for tokens that no page holds."""
    form, length = step.view.layout.progressive, int(step.seq_lens[stream])
    per_group, read = (form.T, decode_scores) if name == "scores" else (form.value_tokens, decode_values)
    out = np.full((length, step.head_dim), np.nan)
    for group, pages in pages_of(step, name, stream):
        rows = out[group * per_group :][:per_group]
        rows[:] = np.concatenate(read(pages, form), 1)[: len(rows), : step.head_dim]
    return out


def digits_of(step, stream):
    """Number of each group of score pages of a stream, with the unit of each part for each query, (G, parts); the
    variance of a logit's error, (G,); and the digits of each part, (parts,).
    """
    form, q = step.view.layout.progressive, step.q[stream].astype(np.float64)
    for group, pages in pages_of(step, "scores", stream):
        units, variance, used = np.zeros((step.queries, len(pages))), np.zeros(step.queries), []
        for part, page in enumerate(pages):
            digits = np.zeros((step.queries, form.m))
            some = q[:, part * form.m : (part + 1) * form.m]
            digits[:, : some.shape[1]] = some
            widths = page[4 * form.m : 5 * form.m].astype(int)
            scaled = digits * to_fp32(page[: 2 * form.m].view(np.uint16), form.bf16).astype(np.float64)
            largest = np.abs(scaled * 4.0 ** np.maximum(widths - 1, 0) * (widths > 0)).max(1)
            units[:, part] = 2.0 ** (np.floor(np.log2(np.maximum(largest, 2.0**-126))) - 6)
            used.append(widths.sum())
            variance += (scaled**2 * np.where(widths > 0, 1 / 12, 1 / 32)).sum(1)
            variance += units[:, part] ** 2 * used[-1] * 3.5 / 12
        scale = 1 / np.sqrt(step.head_dim)
        yield group, units * scale, variance * scale**2, np.array(used)


def fetched(step, unit):
    """Flash pages that a unit has waited for."""
    plans = [item.plan.ppns for item in step.work if isinstance(item, Read) and item.unit == unit]
    return np.concatenate([*plans, np.empty(0, np.uint32)])
