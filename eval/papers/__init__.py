"""Papers whose printed figures are recomputed: one folder each, and shared profiles of hardware and models."""
