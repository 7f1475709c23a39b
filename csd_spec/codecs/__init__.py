"""Codecs: how rows of K and V are stored. One small file each; `csd_spec.layouts` says which layout uses which."""

from csd_spec.codecs.codec import Codec
from csd_spec.codecs.fp8 import FP8
from csd_spec.codecs.verbatim import BF16, FP16

__all__ = ["BF16", "FP8", "FP16", "Codec"]
