"""The command line: one file for each group of commands. Experiments are files of eval, a line each in `experiments.py`."""
