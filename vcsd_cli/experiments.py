"""`vcsd bench` and `vcsd eval`: a line for each experiment, a module with a function `experiment`."""

BENCH = {
    "decode": "eval.bench.decode",
    "attention": "eval.bench.attention",
    "ftl": "eval.bench.ftl",
    "queue-depth": "eval.bench.queue_depth",
    "page-cache": "eval.bench.page_cache",
    "plan": "eval.bench.plan",
    "offload": "eval.bench.offload",
    "reopen": "eval.bench.reopen",
    "crash": "eval.bench.crash",
    "flips": "eval.bench.flips",
    "faults": "eval.bench.faults",
    "soak": "eval.bench.soak",
    "fuzz": "eval.bench.fuzz",
    "cli-fuzz": "eval.bench.cli_fuzz",
    "transport": "eval.bench.transport",
    "simulate": "eval.simulation.simulate",
}
EVAL = {
    "selectors": "eval.accuracy.selectors",
    "front": "eval.accuracy.front",
    "accuracy": "eval.accuracy.accuracy",
    "oracle": "eval.accuracy.choices",
    "families": "eval.accuracy.families",
    "throughput": "eval.papers.instinfer.throughput",
    "breakdown": "eval.papers.instinfer.breakdown",
    "engine-breakdown": "eval.papers.instinfer.engine_breakdown",
    "scaling": "eval.papers.instinfer.scaling",
    "sensitivity": "eval.papers.instinfer.sensitivity",
    "serving": "eval.serving.serving",
    "claims": "eval.papers.claims",
}
