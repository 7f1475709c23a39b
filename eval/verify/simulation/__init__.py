"""The whole stack in one thread with a virtual clock, under faults drawn from a seed; checked against dictionaries."""
