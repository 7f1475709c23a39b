"""Codecs: storage formats of KV rows, one module each; `csd_spec.layouts` defines which layout uses which codec."""

from csd_spec.codecs.codec import Codec
from csd_spec.codecs.fp8 import FP8
from csd_spec.codecs.verbatim import BF16, FP16

__all__ = ["BF16", "FP8", "FP16", "Codec"]
