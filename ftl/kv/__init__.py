"""The KV map: sequences of K and V, how their groups lie in pages, and how they grow, are cut, shared and read."""
