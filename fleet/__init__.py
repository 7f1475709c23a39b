"""Drives on many machines: Ray places them and restarts them, hosts reach them over NVMe/TCP."""
