"""Scheduler side: loads and stores of an iteration, by the keys stored in each worker's drives.

Independent of any engine: requests are objects with the attributes of `Request`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol

from host_driver.prefixes.cache_keys import AdmissionFilter, PrefixNames


@dataclass(frozen=True, slots=True)
class PrefixLoad:
    """Load of a request's tokens from `first` on into these blocks of the engine's cache."""

    request: str
    keys: list[bytes]
    first: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Save:
    """Store of a prompt's tokens from `first` to the end of its keys, from these blocks of the engine's cache."""

    keys: list[bytes]
    first: int
    blocks: list[int]


@dataclass(slots=True)
class PrefixPlan:
    """Loads and stores of an iteration."""

    loads: list[PrefixLoad] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


class EngineRequest(Protocol):
    """Attributes used of an engine's request."""

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
class RequestState:
    """State of a request.

    Attributes:
        extra: What its KV data depends on in addition to model and tokens.
        keys: Keys of its blocks, as far as computed.
        computed: First token of the next load.
        saved: Tokens that are stored or being stored.
        loaded: Its preemption count at the last load; -1 before the first.
    """

    request: EngineRequest
    extra: str = ""
    keys: list[bytes] = field(default_factory=list)
    computed: int = 0
    saved: int = 0
    loaded: int = -1


class PrefixScheduler:
    """Decides which tokens to load and store.

    A token counts as stored when all workers have reported it. A request loads once, and again after each preemption;
    tokens that fail to load are computed.
    """

    def __init__(
        self,
        names: PrefixNames,
        block_tokens: int,
        workers: int,
        admission: AdmissionFilter,
        adapter: Callable[[Any], str | None],
    ) -> None:
        """Create the scheduler with nothing stored.

        Args:
            names: Keys; one of their block size and the engine's must divide the other.
            block_tokens: Tokens per block of the engine's cache.
            workers: Number of workers that store.
            admission: Selects blocks to store.
            adapter: Returns the identity of a request's adapter; None if it is unknown.
        """
        fine, coarse = sorted((names.block_tokens, block_tokens))
        if coarse % fine:
            raise ValueError(f"blocks of {coarse} tokens: must be a multiple of {fine}")
        self._names, self._block_tokens, self._admission = names, block_tokens, admission
        self._step_tokens, self._step_keys = coarse, coarse // names.block_tokens
        self._adapter = adapter
        self._stored: list[set[bytes]] = [set() for _ in range(workers)]
        self._known: dict[str, RequestState] = {}
        self._plan = PrefixPlan()

    def apply_changes(self, changes: Mapping[int, Mapping[bytes, bool]]) -> None:
        """Apply keys that workers report as added (True) or removed."""
        for worker, keys in changes.items():
            for key, there in keys.items():
                (self._stored[worker].add if there else self._stored[worker].discard)(key)

    def begin(self, request: EngineRequest) -> None:
        """Register a request; one that depends on more than its tokens and adapter is ignored."""
        if request.mm_features or request.prompt_embeds is not None:
            return
        adapter = self._adapter(request.lora_request) if request.lora_request else ""
        if adapter is None:
            return
        state = self._known[request.request_id] = RequestState(request, f"{adapter}\0{request.cache_salt or ''}")
        self._admission.record(self._keys(state, request.num_prompt_tokens))

    def matched_tokens(self, request: EngineRequest, computed: int) -> int:
        """Number of tokens after the first `computed` that can be loaded; at least one is left to compute."""
        state = self._known.get(request.request_id)
        if state is None or state.loaded == request.num_preemptions:
            return 0
        state.computed = computed
        tokens = self._stored_tokens(self._keys(state, len(request.all_token_ids) - 1))
        return max(0, tokens - computed)

    def add_load(self, request: EngineRequest, blocks: Sequence[int], tokens: int) -> None:
        """Plan a load of `tokens` tokens into blocks that the engine allocated for the request."""
        if not tokens:
            return
        state, size = self._known[request.request_id], self._block_tokens
        state.loaded = request.num_preemptions
        end = state.computed + tokens
        into = list(blocks[state.computed // size : end // size])
        keys = state.keys[: end // self._names.block_tokens]
        self._plan.loads.append(PrefixLoad(request.request_id, keys, state.computed, into))

    def plan(self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Sequence[int]]) -> PrefixPlan:
        """Plan of the next iteration, in which requests compute the scheduled numbers of tokens."""
        for request_id, tokens in scheduled.items():
            state = self._known.get(request_id)
            if state and (save := self._save(state, tokens, blocks_of)):
                self._plan.saves.append(save)
        plan, self._plan = self._plan, PrefixPlan()
        return plan

    def _save(self, state: RequestState, tokens: int, blocks_of: Callable[[str], Sequence[int]]) -> Save | None:
        """Store of the blocks that are complete at the end of the iteration.

        Of the prompt, all computed tokens count. Of the output, only tokens of earlier iterations count, without the
        last one, which is the input of the next iteration.
        """
        r = state.request
        prompt = min(r.num_computed_tokens + tokens, r.num_prompt_tokens)
        keys = self._keys(state, max(prompt, min(r.num_computed_tokens, len(r.all_token_ids) - 1)))
        keys = keys[: self._admission.admitted(keys) // self._step_keys * self._step_keys]
        first, end = max(state.saved, self._stored_tokens(keys)), len(keys) * self._names.block_tokens
        if end <= first:
            return None
        state.saved, size = end, self._block_tokens
        return Save(keys, first, list(blocks_of(r.request_id)[first // size : end // size]))

    def end(self, request_id: str) -> None:
        """Forget a finished request."""
        self._known.pop(request_id, None)

    def _keys(self, state: RequestState, tokens: int) -> list[bytes]:
        """Keys of a request's first tokens, in whole blocks of both the engine and the drives."""
        whole = tokens // self._step_tokens * self._step_keys
        if len(state.keys) < whole:
            ids = list(state.request.all_token_ids[: whole * self._names.block_tokens])
            state.keys = self._names.keys(ids, state.extra, state.keys)
        return state.keys[:whole]

    def _stored_tokens(self, keys: Sequence[bytes]) -> int:
        """Tokens of the longest prefix that all workers have, in whole blocks of the engine."""
        prefix = takewhile(lambda key: all(key in worker_keys for worker_keys in self._stored), keys)
        return len(list(prefix)) // self._step_keys * self._step_tokens
