"""Fleet: Ray places drives on many nodes and restarts them; hosts reach them over NVMe/TCP."""
