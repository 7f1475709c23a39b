"""Tutti's claims: K and V of prefixes kept on SSDs, which a GPU reads by itself, layer by layer."""
