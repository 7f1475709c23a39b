"""Papers whose printed figures are worked out again: a folder each, and profiles of hardware and models for all."""
