"""`vcsd bench` and `vcsd eval`: a line for each experiment, a module with a function `experiment`."""

BENCH = {
    "decode": "eval.bench.decode",
    "attention": "eval.bench.attention",
    "ftl": "eval.bench.ftl",
    "queue-depth": "eval.bench.queue_depth",
    "page-cache": "eval.bench.page_cache",
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
    "accuracy": "eval.accuracy.accuracy",
    "oracle": "eval.accuracy.choices",
    "families": "eval.accuracy.families",
    "throughput": "eval.paper.throughput",
    "breakdown": "eval.paper.breakdown",
    "engine-breakdown": "eval.paper.engine_breakdown",
    "scaling": "eval.paper.scaling",
    "sensitivity": "eval.paper.sensitivity",
    "claims": "eval.paper.claims",
}
