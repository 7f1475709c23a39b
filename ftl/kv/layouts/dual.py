"""The paper's layout (InstInfer, section IV-C): K and V token-indexed, and a copy of K embedding-indexed."""

from __future__ import annotations

from functools import partial

from csd_spec import KvLayout
from csd_spec.model import BF16, FP8, LATENT
from csd_spec.planes import BRAIN
from ftl.flash.tag import Kind
from ftl.kv.layouts.coded import CodedEmbeddingMap
from ftl.kv.layouts.embedding import EmbeddingMap
from ftl.kv.layouts.float8 import Float8EmbeddingMap, Float8Map
from ftl.kv.layouts.group_map import GroupMap
from ftl.kv.layouts.layout import Layout
from ftl.kv.layouts.token import TokenMap


def embedding_map(form: KvLayout, layers: int, heads: int) -> EmbeddingMap:
    """The map of the embedding-indexed copy of K."""
    if form.fp8:
        return Float8EmbeddingMap(form, layers, heads)
    return (EmbeddingMap if form.bits == 16 else CodedEmbeddingMap)(form, layers, heads)


def maps(form: KvLayout, layers: int, heads: int) -> dict[str, GroupMap]:
    """K, V, and the copy of K."""
    rows = Float8Map if form.fp8 else TokenMap
    return {
        "k": rows(Kind.K, "k", form, layers, heads),
        "v": rows(Kind.V, "v", form, layers, heads),
        "embedding_k": embedding_map(form, layers, heads),
    }


def latent_maps(form: KvLayout, layers: int, heads: int) -> dict[str, GroupMap]:
    """K, of which V is a part, and the copy of K."""
    return {name: mapped for name, mapped in maps(form, layers, heads).items() if name != "v"}


LATENT_ROWS = Layout("latent", LATENT, partial(KvLayout.for_context, kind=LATENT), latent_maps)
BF16_ROWS = Layout("bf16", BF16, partial(KvLayout.for_context, kind=BF16), maps)  # FP16 in all but what values mean
FP8_ROWS = Layout("fp8", FP8, partial(KvLayout.for_context, kind=FP8), maps, "4 bits, of the largest of its row on")
FP16, INT8, INT4 = (
    Layout(name, bits, partial(KvLayout.for_context, bits=bits), maps)
    for name, bits in (("fp16", 16), ("int8", 8), ("int4", 4))
)
INT8_BF16, INT4_BF16 = (
    Layout(name, BRAIN | bits, partial(KvLayout.for_context, bits=bits, kind=BF16), maps)
    for name, bits in (("int8-bf16", 8), ("int4-bf16", 4))
)
