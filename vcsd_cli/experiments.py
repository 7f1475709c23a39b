"""`vcsd bench` and `vcsd eval`: a line for each experiment, a module with a function `experiment`."""

BENCH = {
    "decode": "eval.bench.decode",
    "attention": "eval.bench.attention",
    "ftl": "eval.bench.ftl",
    "queue-depth": "eval.bench.queue_depth",
    "page-cache": "eval.bench.page_cache",
    "offload": "eval.bench.offload",
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
    "claims": "eval.papers.claims",
    "tiers": "eval.papers.tierkv.tiers",
}
