"""vLLM with a model in a process of its own: a line of JSON in for each batch of prompts, a line out with its tokens.

For the Python of an environment that has vLLM; nothing of ours is imported but the connector, by vLLM itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

PATIENCE_S = 60.0  # for blocks to be stored


def main() -> None:
    """The only argument: vLLM's own, as JSON. In: `prompts`, lists of tokens, and how many `tokens` to add to each; or
    `stored`, blocks to wait for. Out: `tokens`, and counters since the engine began."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is for people
    from vllm import LLM

    llm = LLM(**json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "stored" in asked:
            _await(llm, asked["stored"])
        tokens = _generate(llm, asked["prompts"], asked["tokens"]) if "prompts" in asked else []
        print(json.dumps({"tokens": tokens} | _counters(llm)), file=out, flush=True)


def _generate(llm: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    greedy = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    given = [TokensPrompt(prompt_token_ids=each) for each in prompts]
    return [list(each.outputs[0].token_ids) for each in llm.generate(given, greedy, use_tqdm=False)]


def _await(llm: Any, blocks: int) -> None:
    """Let the engine run on until so many blocks are stored; it hears of them only while it runs."""
    deadline = time.monotonic() + PATIENCE_S
    while _counters(llm)["stored_blocks"] < blocks:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{_counters(llm)['stored_blocks']} of {blocks} blocks were stored")
        _generate(llm, [[1]], 4)


def _counters(llm: Any) -> dict[str, int]:
    found = {each.name: int(each.value) for each in llm.get_metrics() if hasattr(each, "value")}
    ours = {name.removeprefix("vllm:vcsd_"): value for name, value in found.items() if "vcsd" in name}
    return {"stored_blocks": 0, "loads_failed": 0} | ours | {"external_hits": found["vllm:external_prefix_cache_hits"]}


if __name__ == "__main__":
    main()
