"""A host that sends random verbs to a drive, and applies the same to plain arrays."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np

from csd_spec import LAYOUTS, DriveSpec, Geometry, PageFormat
from csd_spec.arrays import F16, U8
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from ftl import Ftl, Nand, OutOfSpaceError, round_to_codec
from ftl.kv.layouts.codes import refine, refined
from ftl.kv.values import VALUES

HEADS, LAYERS, DIM, LOGICAL_PAGES = 2, 2, 16, 24
KEYS = [bytes([number]) * 16 for number in range(6)]
VALUE_KEYS = [b"a", b"a\0", b"of sixteen bytes"]
VALUE_BYTES = (0, 1, 1024, 1500, 6000)
VERBS = (
    *("create", "append", "append", "append", "decode", "fork", "crop", "free", "relayout", "flush"),
    *("write", "write", "discard", "name", "name", "unname", "store", "store", "delete"),
)


@dataclass(slots=True)
class StoredSequence:
    """Contents of a sequence: keys and values of each layer, (S, H, d), and the tokens of each prefix key.

    value: bytes, if the sequence is a value; then it has no layers, and its key has the size.
    """

    layers: list[tuple[F16, F16]]
    names: dict[bytes, int] = field(default_factory=dict)
    value: bytes | None = None

    def copy(self) -> StoredSequence:
        """For one that goes on."""
        return StoredSequence(list(self.layers), dict(self.names), self.value)


State = dict[int, StoredSequence]  # handle -> contents

LARGEST = 1.99  # of a row: from 2 on, the bits of an FP16 number read as BF16 are a much larger number
DRIVE: DriveSpec = replace(
    INSTCSD_ZYNQ7045_8CH,
    name="crash",
    dram_bytes=48 << 10,
    geometry=Geometry(
        channels=2, dies_per_channel=2, planes_per_die=1, blocks_per_plane=16, pages_per_block=8, page_bytes=512
    ),
)


FORMS = [
    *(
        LAYOUTS[name].paged(DRIVE.geometry.page_bytes, DIM, m)
        for name, m in (("fp16", 2), ("fp16", 4), ("fp16", 8), ("int8", 8), ("int4", DIM))
    ),
    *(
        LAYOUTS[name].form(DRIVE.geometry.page_bytes, DIM, 128)
        for name in (
            *("progressive", "progressive4", "progressive4-exact", "fp8"),
            *("int8-bf16", "progressive-bf16", "progressive4-bf16-exact", "progressive-bf16-latent"),
        )
    ),
]


def as_stored(form: PageFormat, before: int, k: F16, v: F16) -> tuple[F16, F16]:
    """Keys and values (S, H, d) as a layout stores them.

    Groups that were not full at `before` tokens are rounded to 8 bits; encoded layouts round all rows. If V is a part
    of K, V is taken from K.
    """
    if not form.rows.exact:
        return round_to_codec(form, k), round_to_codec(form, v)
    planes = None if form.keeps_rows else form.progressive
    for group in range(before // form.n, len(k) // form.n) if planes else ():
        assert planes is not None
        part = slice(group * form.n, (group + 1) * form.n)
        rows = np.concatenate([k[part], v[part]][: planes.parts], axis=2).transpose(1, 0, 2)
        pages: U8 = np.zeros((rows.shape[0], form.page_bytes), np.uint8)
        refine(pages, planes, np.ascontiguousarray(rows).view(np.uint16))
        back = refined(pages, planes).view(np.float16).transpose(1, 0, 2)
        k[part], v[part] = back[..., : form.head_dim], back[..., -form.head_dim :]
    return k, k if form.latent else v


def _keys_of(state: State) -> set[bytes]:
    return {key for stored in state.values() if stored.value is not None for key in stored.names}


def is_stored(ftl: Ftl, handle: int, stored: StoredSequence) -> bool:
    """Whether a sequence holds this value, byte for byte. Raises UncorrectableReadError."""
    assert stored.value is not None
    return ftl.read_value(handle, len(stored.value), 0)[0] == stored.value


class RandomHost:
    """Random verbs on a drive; `model` and `blocks` are what it has to hold."""

    def __init__(self, seed: int, nand: Nand) -> None:
        self.draw, self.generator = random.Random(seed), np.random.default_rng(seed)
        self.ftl = Ftl(DRIVE, nand)
        self.ftl.blocks.resize(LOGICAL_PAGES)
        self.model: State = {}
        self._deleted: set[bytes] = set()  # keys of values, since the last commit
        self.blocks = np.zeros((LOGICAL_PAGES, DRIVE.geometry.page_bytes), np.uint8)

    def rows(self, tokens: int) -> F16:
        """Random rows; read as BF16 they are below 2 too.

        A larger one would set the steps in which 8 bits keep a group, and a crop could remove it before `scores_agree`
        derives its tolerance from the group.
        """
        rows = self.generator.standard_normal((tokens, HEADS, DIM))
        return np.clip(rows, -LARGEST, LARGEST).astype(np.float16)

    def step(self) -> None:
        """One verb; one that the full drive refuses changes nothing."""
        sequences = self._sequences()
        verb = self.draw.choice(VERBS) if sequences else "create"
        if len(sequences) >= 6:
            verb = "free"
        try:
            getattr(self, f"_{verb}")()
        except OutOfSpaceError:
            if self._sequences():
                self._free()
            else:
                self._delete()

    def _sequences(self) -> list[int]:
        """Handles of all sequences that are not values."""
        return sorted(handle for handle, stored in self.model.items() if stored.value is None)

    def _any(self) -> int:
        return self.draw.choice(self._sequences())

    def _create(self) -> None:
        (handle,) = self.ftl.create(1, LAYERS, HEADS, self.draw.choice(FORMS))
        self.model[handle] = StoredSequence([(self.rows(0), self.rows(0)) for _ in range(LAYERS)])

    def _append(self, tokens: int | None = None) -> None:
        handle, tokens = self._any(), tokens or self.draw.choice([7, 40, 90])
        for layer in range(LAYERS):
            k, v = self.rows(tokens), self.rows(tokens)
            self.ftl.append([handle], layer, np.array([tokens]), k, v, 0)
            old, form = self.model[handle].layers[layer], self.ftl.sequence(handle).layout
            grown = np.concatenate([old[0], k]), np.concatenate([old[1], v])
            self.model[handle].layers[layer] = as_stored(form, len(old[0]), *grown)

    def _decode(self) -> None:
        for _ in range(20):
            self._append(1)

    def _fork(self) -> None:
        handle = self._any()
        child = self.ftl.fork(handle)
        self.model[child] = StoredSequence(list(self.model[handle].layers))

    def _crop(self) -> None:
        handle = self._any()
        stored = self.model[handle]
        for layer, (k, v) in enumerate(stored.layers):
            length = int(len(k) * self.draw.random())
            self.ftl.crop(handle, layer, length, 0)
            stored.layers[layer] = k[:length], v[:length]
            stored.names = {key: tokens for key, tokens in stored.names.items() if tokens <= length}

    def _free(self) -> None:
        self._drop([self._any()])

    def _relayout(self) -> None:
        handle, m = self._any(), self.draw.choice([2, 4, 8])
        if "embedding_k" in self.ftl.sequence(handle).maps:
            self.ftl.relayout(handle, m, 0)

    def _name(self) -> None:
        handle, keys = self._any(), self.draw.sample(KEYS, 2)
        length = min(len(k) for k, _ in self.model[handle].layers)
        if length:
            tokens = [self.draw.randint(1, length) for _ in keys]
            self.ftl.name(handle, keys, tokens)
            self._forget(keys)
            self.model[handle].names |= dict(zip(keys, tokens, strict=True))

    def _unname(self) -> None:
        keys = self.draw.sample(KEYS, 1)
        self.ftl.unname(0, keys)
        self._forget(keys)

    def _store(self) -> None:
        key, value = self.draw.choice(VALUE_KEYS), self.generator.bytes(self.draw.choice(VALUE_BYTES))
        replaced = self._with_key(key)
        handle, _ = self.ftl.store_value(VALUES, key, value, 0)
        self._forget([key])
        self.model[handle] = StoredSequence([], {key: len(value)}, value)
        self._drop(replaced)

    def _delete(self) -> None:
        key = self.draw.choice(VALUE_KEYS)
        self._deleted.add(key)
        self._drop(self._with_key(key))

    def lost_keys(self, before: State, after: State) -> int:
        """Keys of values of a commit that the next one lacks, though they were not deleted since."""
        lost = _keys_of(before) - _keys_of(after) - self._deleted
        self._deleted.clear()
        return len(lost)

    def _with_key(self, key: bytes) -> list[int]:
        return [handle for handle, stored in self.model.items() if key in stored.names]

    def _drop(self, handles: list[int]) -> None:
        self.ftl.free(handles, 0)
        for handle in handles:
            del self.model[handle]

    def _forget(self, keys: list[bytes]) -> None:
        for stored in self.model.values():
            stored.names = {key: tokens for key, tokens in stored.names.items() if key not in keys}

    def _flush(self) -> None:
        self.ftl.flush(0)

    def _write(self) -> None:
        lpns = np.array(self.draw.sample(range(LOGICAL_PAGES), 3))
        data = self.generator.integers(0, 255, (3, DRIVE.geometry.page_bytes), dtype=np.uint8)
        self.ftl.blocks.write(lpns, data, 0)
        self.blocks[lpns] = data

    def _discard(self) -> None:
        first = self.draw.randrange(LOGICAL_PAGES)
        count = self.draw.randint(1, LOGICAL_PAGES - first)
        self.ftl.blocks.discard(first, count)
        self.blocks[first : first + count] = 0
