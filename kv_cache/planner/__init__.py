"""Planner: which layers of each request are offloaded from the device; exact and heuristic solvers."""
