"""A user-defined 6-bit layout: a file for `--layouts-file`, or a module with an entry point `vcsd.layouts`.

A vector of t values is an exponent e, one byte, and t codes of 6 bits, packed. A value is code x 2^e.
"""

import numpy as np

from csd_spec import Group, KvLayout
from csd_spec.codecs import Codec

BITS, MAX_CODE = 6, 31
MIN_EXPONENT, MAX_EXPONENT = -24, 11  # exponents, so that FP16 represents every value exactly


def row_bytes(values):
    return 1 + -(-BITS * values // 8)


def encode(values):
    wide = np.ascontiguousarray(values).view(np.float16).astype(np.float32)
    fraction, exponent = np.frexp(np.abs(wide).max(axis=-1, keepdims=True) / np.float32(MAX_CODE))
    exponent = np.where(fraction > 0, exponent - (fraction == 0.5), MIN_EXPONENT).clip(MIN_EXPONENT, MAX_EXPONENT)
    codes = np.rint(np.ldexp(wide, -exponent)).clip(-MAX_CODE, MAX_CODE).astype(np.int8).view(np.uint8)
    bits = np.unpackbits(codes[..., None], axis=-1)[..., -BITS:]
    packed = np.packbits(bits.reshape(*codes.shape[:-1], -1), axis=-1)
    return np.concatenate([exponent.astype(np.int8).view(np.uint8), packed], axis=-1)


def decode(vectors, values):
    bits = np.unpackbits(vectors[..., 1:], axis=-1, count=BITS * values)
    codes = np.packbits(bits.reshape(*vectors.shape[:-1], values, BITS), axis=-1)[..., 0].view(np.int8) >> 8 - BITS
    exponent = np.ascontiguousarray(vectors[..., :1]).view(np.int8).astype(np.int32)
    return np.ldexp(codes.astype(np.float32), exponent).astype(np.float16).view(np.uint16)


LAYOUTS = {
    "int6": KvLayout(
        name="int6",
        code=240,
        rows=Codec("int6", "fp16", row_bytes, encode, decode),
        groups=(Group("k", "k", "rows"), Group("v", "v", "rows"), Group("embedding_k", "k", "channels")),
        lossy="6 bits: a value within 1/31 of the largest of its row",
    )
}
