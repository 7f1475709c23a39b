"""Stand-in for vLLM's process: answers as `vcsd_eval.bench.vllm_child` does, with a "model" that adds up its prompt.

$FAKE_VLLM: `wrong` returns other tokens if drives are used, `blind` finds nothing in them, `dead` exits at once.
"""

import json
import os
import sys

arguments = json.loads(sys.argv[-1])
drives = arguments.get("kv_transfer_config")
how = os.environ.get("FAKE_VLLM", "") if drives else ""
if how == "dead":
    sys.exit("no such model")
print(json.dumps({"ready": True}), flush=True)
hits = failed = 0
for line in sys.stdin:
    asked = json.loads(line)
    tokens = [[(sum(each) + n) % 256 for n in range(asked["tokens"])] for each in asked.get("prompts", ())]
    if how == "wrong":
        tokens = [[token[0] + 1, *token[1:]] for token in tokens]
    if drives and how != "blind":
        hits += 576 * len(tokens)
        failed += 1
    print(json.dumps({"tokens": tokens, "external_hits": hits, "loads_failed": failed, "stored_blocks": 9}), flush=True)
