"""Ways to attend, by name. A method is a function from a `Step` to the attention output, and one small file."""

from functools import partial

from attention_engine.methods.dense import dense
from attention_engine.methods.double_sparsity import double_sparsity
from attention_engine.methods.h2o import h2o
from attention_engine.methods.local import local
from attention_engine.methods.oracle import top_k_oracle
from attention_engine.methods.ours import paged, spending
from attention_engine.methods.quest import quest
from attention_engine.methods.sparf import sparf, sparf_apart, sparq
from attention_engine.methods.twilight import twilight
from attention_engine.select import GroupScore
from attention_engine.step import Method

METHODS: dict[str, Method] = {
    "dense": dense,
    "sparf": sparf,
    "sparf-apart": sparf_apart,
    "sparq": sparq,
    "sparq-logits": partial(sparq, group_score=GroupScore.LOGITS),
    "local": local,
    "h2o": h2o,
    "quest": quest,
    "double-sparsity": double_sparsity,
    "twilight": twilight,
    "top-k-oracle": top_k_oracle,
    "spending": spending,
    "paged": paged,
    "paged-top-p": partial(paged, top_p=0.95),
}
