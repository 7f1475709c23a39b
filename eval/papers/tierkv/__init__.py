"""TierKV's tables and claims: KV blocks that come to the GPU ahead of a schedule known in advance."""
