"""Measurements of serving under load: machines, runs of a trace, cost of a plan."""
