"""The kernels that compute the values of a step, by name."""

from __future__ import annotations

from attention_engine.coarse import attend_coarse, score
from attention_engine.kernels import approximate, attend, exact
from attention_engine.page_selection import weigh_pages
from attention_engine.refined import attend_refined
from attention_engine.select import best_tokens, selected_mass, softmax_scores, top_channels, top_mass, top_pages


class Arithmetic:
    """The kernels that compute the values of a step. A timing-only simulation replaces them with stubs."""

    top_channels = staticmethod(top_channels)
    approximate = staticmethod(approximate)
    exact = staticmethod(exact)
    attend = staticmethod(attend)
    attend_refined = staticmethod(attend_refined)
    attend_coarse = staticmethod(attend_coarse)
    score = staticmethod(score)
    weigh_pages = staticmethod(weigh_pages)
    softmax_scores = staticmethod(softmax_scores)
    best_tokens = staticmethod(best_tokens)
    top_pages = staticmethod(top_pages)
    top_mass = staticmethod(top_mass)
    selected_mass = staticmethod(selected_mass)
