"""KV map: sequences of keys and values; packing of their groups into pages, append, truncate, fork and read."""
