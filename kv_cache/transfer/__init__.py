"""Transfers: simulated and real executors of copies, frames in memory and files, and whole sequences."""
