"""Placement policies on a trace of requests, in simulated time: `python examples/policy_on_a_trace.py [FILE:NAME ...]`.

Any policy works that `vcsd eval policies --policy` takes, such as `examples/policy_30_lines.py:half`.
"""

import sys

from kv_cache import AdmissionConfig, generate, simulate, summary
from kv_cache.policies import policy_of
from vcsd_eval.serving.machines import COSTS

cost = COSTS["a6000"]  # Llama-3-8B
trace = generate(60, rate=0.4, input_tokens=(1000, 6000), output_tokens=(50, 300))
print(f"{len(trace.requests)} requests, {cost.name}")
print(f"{'policy':32} {'tokens/s':>9} {'TTFT p99, s':>12} {'TPOT p99, ms':>13} {'deadlines':>10}")
for name in sys.argv[1:] or ["flexgen-half", "layerkv", "orbitflow", "examples/policy_30_lines.py:half"]:
    served = simulate(trace, cost, policy_of(name), cost.slo_s(1.5), AdmissionConfig(max_batch_size=8, reject=True))
    row = summary(served)
    print(
        f"{name:32} {row['tokens_per_s']:9.1f} {row['ttft_s']['p99']:12.2f} {1e3 * row['tpot_s']['p99']:13.1f} "
        f"{row['deadline_attainment']:10.1%}"
    )
