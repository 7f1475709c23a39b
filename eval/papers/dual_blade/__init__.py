"""Dual-Blade's configurations and claims: KV offloaded to a page cache and an SSD of one edge machine."""
