"""OrbitFlow's systems and claims: KV of each request offloaded by layers, and requests that pause."""
