"""The whole stack in one thread with a virtual clock, under faults that a seed draws; plain dictionaries judge it."""
