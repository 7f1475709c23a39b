"""The numbers behind a step: the kernels of methods, by name."""

from __future__ import annotations

from attention_engine.coarse import attend_coarse, score
from attention_engine.kernels import approximate, attend, exact
from attention_engine.refined import attend_refined
from attention_engine.select import best_tokens, cover, top_channels, top_mass, top_pages, weigh
from attention_engine.spend import weigh_pages


class Arithmetic:
    """The numbers behind a step. A simulation that only counts and times puts others in their place."""

    top_channels = staticmethod(top_channels)
    approximate = staticmethod(approximate)
    exact = staticmethod(exact)
    attend = staticmethod(attend)
    attend_refined = staticmethod(attend_refined)
    attend_coarse = staticmethod(attend_coarse)
    score = staticmethod(score)
    weigh_pages = staticmethod(weigh_pages)
    weigh = staticmethod(weigh)
    best_tokens = staticmethod(best_tokens)
    top_pages = staticmethod(top_pages)
    top_mass = staticmethod(top_mass)
    cover = staticmethod(cover)
