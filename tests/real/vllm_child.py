"""vLLM with a model in a separate process: one line of JSON per batch of prompts in, one line with its tokens out.

Runs in the Python environment that has vLLM; of this project only the connector is imported, by vLLM itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

PATIENCE_S = 60.0  # limit of the wait for stored blocks


def main() -> None:
    """The only argument: vLLM's engine arguments.

    Input lines: `prompts`, lists of tokens, and `tokens`, the number to generate for each; or `stored`, the number of
    blocks to wait for. Output lines: `tokens`, and counters since the engine started.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's log must not mix with the JSON output
    from vllm import LLM

    llm = LLM(**json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        if "stored" in question:
            _await(llm, question["stored"])
        tokens = _generate(llm, question["prompts"], question["tokens"]) if "prompts" in question else []
        print(json.dumps({"tokens": tokens} | _counters(llm)), file=out, flush=True)


def _generate(llm: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    greedy = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(given, greedy, use_tqdm=False)]


def _await(llm: Any, blocks: int) -> None:
    """Run the engine until `blocks` blocks are stored; it receives store completions only while it runs."""
    deadline = time.monotonic() + PATIENCE_S
    while _counters(llm)["stored_blocks"] < blocks:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{_counters(llm)['stored_blocks']} of {blocks} blocks were stored")
        _generate(llm, [[1]], 4)


def _counters(llm: Any) -> dict[str, int]:
    counters = {metric.name: int(metric.value) for metric in llm.get_metrics() if hasattr(metric, "value")}
    ours = {name.removeprefix("vllm:vcsd_"): value for name, value in counters.items() if "vcsd" in name}
    return (
        {"stored_blocks": 0, "loads_failed": 0} | ours | {"external_hits": counters["vllm:external_prefix_cache_hits"]}
    )


if __name__ == "__main__":
    main()
