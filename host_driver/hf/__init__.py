"""Hugging Face models: a cache whose K and V live in drives, and the attention that goes with it."""
