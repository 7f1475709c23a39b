"""Prefixes of prompts in drives: their names, the store, and who loads and stores beside a server's own work."""
