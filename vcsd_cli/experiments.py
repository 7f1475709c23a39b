"""Experiments of `vcsd bench` and `vcsd eval`: module of each, with a function `experiment`."""

BENCH = {
    "decode": "vcsd_eval.bench.decode",
    "attention": "vcsd_eval.bench.attention",
    "ftl": "vcsd_eval.bench.ftl",
    "transport": "vcsd_eval.bench.transport",
    "hosts": "vcsd_eval.bench.hosts",
}
EVAL = {
    "methods": "vcsd_eval.accuracy.methods",
    "accuracy": "vcsd_eval.accuracy.accuracy",
    "throughput": "vcsd_eval.papers.instinfer.throughput",
    "breakdown": "vcsd_eval.papers.instinfer.breakdown",
    "engine-breakdown": "vcsd_eval.papers.instinfer.engine_breakdown",
    "scaling": "vcsd_eval.papers.instinfer.scaling",
    "sensitivity": "vcsd_eval.papers.instinfer.sensitivity",
    "serving": "vcsd_eval.serving.serving",
    "policies": "vcsd_eval.serving.policies",
    "fair": "vcsd_eval.fair.fair",
    "map": "vcsd_eval.fair.map",
    "claims": "vcsd_eval.papers.compare",
    "machine": "vcsd_eval.papers.machines",
    "ssd": "vcsd_eval.ssd.ssd",
    "lifetime": "vcsd_eval.lifetime.lifetime",
    "fleet": "vcsd_eval.fleet.fleet",
    "cost-table": "vcsd_eval.fleet.cost_table",
    "tiered-serving": "vcsd_eval.papers.tierkv.tiers",
    "prefixes": "vcsd_eval.papers.tutti.prefixes",
}
