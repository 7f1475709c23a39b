"""Requests that share a device by time slices, their K and V in three tiers: device, host memory, flash."""
