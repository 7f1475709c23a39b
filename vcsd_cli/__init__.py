"""Command line: one module per group of commands. Experiments are modules of eval, listed in `experiments.py`."""
