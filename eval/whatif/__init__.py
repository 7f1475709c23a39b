"""`vcsd whatif`: sweeps over a drive's fields, method, layout and network, and their Pareto front."""
