"""What a scheduler wants loaded and stored in an iteration, and what it knows of what is stored.

Nothing here needs an engine: requests are anything with the attributes of `Request`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol

from host_driver.prefixes.names import Admission, PrefixNames


@dataclass(frozen=True, slots=True)
class Load:
    """A request's tokens from `first` on, as many as fill these blocks of the engine's cache."""

    request: str
    keys: list[bytes]
    first: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Save:
    """Blocks of the engine's cache that hold a prompt's tokens from `first` on, up to the end of its keys."""

    keys: list[bytes]
    first: int
    blocks: list[int]


@dataclass(slots=True)
class Plan:
    """Of an iteration."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


class Request(Protocol):
    """What is asked of an engine's request."""

    request_id: str
    all_token_ids: Sequence[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    lora_request: Any
    cache_salt: str | None
    mm_features: Sequence[Any]
    prompt_embeds: Any


@dataclass(slots=True)
class Known:
    """What is known of a request.

    Attributes:
        extra: What its keys and values depend on in addition to model and tokens.
        keys: Keys of its blocks, as far as they were needed.
        computed: First token of the next load.
        saved: Tokens that are stored, or on their way.
        loaded: Its preemptions when something was loaded for it; -1 if nothing was.
    """

    request: Request
    extra: str = ""
    keys: list[bytes] = field(default_factory=list)
    computed: int = 0
    saved: int = 0
    loaded: int = -1


class Scheduling:
    """The scheduler's side: which tokens are stored, which are to be loaded and stored.

    A token counts as stored when all workers have said so. A request loads once, and once more after each preemption:
    what has failed is computed.
    """

    def __init__(
        self,
        names: PrefixNames,
        block_tokens: int,
        workers: int,
        admission: Admission,
        adapter: Callable[[Any], str | None],
    ) -> None:
        """Begin with nothing stored.

        Args:
            names: Keys; the tokens of their blocks and of the engine's must divide one another.
            block_tokens: Tokens of a block of the engine's cache.
            workers: Workers that store.
            admission: Which blocks are stored.
            adapter: Identity of a request's adapter; None if it is not known.
        """
        fine, coarse = sorted((names.block_tokens, block_tokens))
        if coarse % fine:
            raise ValueError(f"blocks of {coarse} tokens: must be a multiple of {fine}")
        self._names, self._block_tokens, self._admission = names, block_tokens, admission
        self._step_tokens, self._step_keys = coarse, coarse // names.block_tokens
        self._adapter = adapter
        self._stored: list[set[bytes]] = [set() for _ in range(workers)]
        self._known: dict[str, Known] = {}
        self._plan = Plan()

    def heard(self, changes: Mapping[int, Mapping[bytes, bool]]) -> None:
        """Workers say which keys came (True) and went."""
        for worker, keys in changes.items():
            for key, there in keys.items():
                (self._stored[worker].add if there else self._stored[worker].discard)(key)

    def begin(self, request: Request) -> None:
        """A request comes. What depends on more than its tokens and its adapter is left alone."""
        if request.mm_features or request.prompt_embeds is not None:
            return
        adapter = self._adapter(request.lora_request) if request.lora_request else ""
        if adapter is None:
            return
        known = self._known[request.request_id] = Known(request, f"{adapter}\0{request.cache_salt or ''}")
        self._admission.see(self._keys(known, request.num_prompt_tokens))

    def matched(self, request: Request, computed: int) -> int:
        """How many tokens behind the first `computed` can be loaded; one at least is left to compute."""
        known = self._known.get(request.request_id)
        if known is None or known.loaded == request.num_preemptions:
            return 0
        known.computed = computed
        tokens = self._there(self._keys(known, len(request.all_token_ids) - 1))
        return max(0, tokens - computed)

    def allocated(self, request: Request, blocks: Sequence[int], tokens: int) -> None:
        """The engine has these blocks for the request, and wants so many tokens loaded into them."""
        if not tokens:
            return
        known, size = self._known[request.request_id], self._block_tokens
        known.loaded = request.num_preemptions
        end = known.computed + tokens
        into = list(blocks[known.computed // size : end // size])
        keys = known.keys[: end // self._names.block_tokens]
        self._plan.loads.append(Load(request.request_id, keys, known.computed, into))

    def plan(self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Sequence[int]]) -> Plan:
        """Of the iteration that is about to begin, in which requests compute so many tokens."""
        for request_id, tokens in scheduled.items():
            known = self._known.get(request_id)
            if known and (save := self._save(known, tokens, blocks_of)):
                self._plan.saves.append(save)
        plan, self._plan = self._plan, Plan()
        return plan

    def _save(self, known: Known, tokens: int, blocks_of: Callable[[str], Sequence[int]]) -> Save | None:
        """Whole blocks that are computed when the iteration ends: of the prompt as far as it goes; of what was drawn
        only what earlier iterations have computed, without the last token, which the next one takes in."""
        r = known.request
        prompt = min(r.num_computed_tokens + tokens, r.num_prompt_tokens)
        keys = self._keys(known, max(prompt, min(r.num_computed_tokens, len(r.all_token_ids) - 1)))
        keys = keys[: self._admission.admitted(keys) // self._step_keys * self._step_keys]
        first, end = max(known.saved, self._there(keys)), len(keys) * self._names.block_tokens
        if end <= first:
            return None
        known.saved, size = end, self._block_tokens
        return Save(keys, first, list(blocks_of(r.request_id)[first // size : end // size]))

    def end(self, request_id: str) -> None:
        """A request is gone."""
        self._known.pop(request_id, None)

    def _keys(self, known: Known, tokens: int) -> list[bytes]:
        """Of the request's first tokens, as far as they fill blocks of the engine and of the drives."""
        whole = tokens // self._step_tokens * self._step_keys
        if len(known.keys) < whole:
            ids = list(known.request.all_token_ids[: whole * self._names.block_tokens])
            known.keys = self._names.keys(ids, known.extra, known.keys)
        return known.keys[:whole]

    def _there(self, keys: Sequence[bytes]) -> int:
        """Tokens of the longest prefix that all workers have, in whole blocks of the engine."""
        found = takewhile(lambda key: all(key in each for each in self._stored), keys)
        return len(list(found)) // self._step_keys * self._step_tokens
