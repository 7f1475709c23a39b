"""Serving under load, measured: machines, runs of a trace, what a plan costs."""
