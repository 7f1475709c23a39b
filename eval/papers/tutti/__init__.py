"""Tutti's claims: KV data of prefixes on SSDs, which the GPU reads by itself, layer by layer."""
