"""Prefix cache in drives: cache keys, the store, and asynchronous loads and stores."""
