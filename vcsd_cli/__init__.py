"""Command line: one module per group of commands. `experiments.py` lists the experiments, modules of `vcsd_eval`."""
