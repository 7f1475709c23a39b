"""Hugging Face integration: a cache with KV data in drives, and its attention."""
