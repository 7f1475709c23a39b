"""TierKV's tables and claims: KV blocks prefetched to the GPU for a schedule that is known in advance."""
