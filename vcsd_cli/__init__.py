"""The command line: one file for each group of commands. Experiments are files of eval, with a line in
`experiments.py`."""
