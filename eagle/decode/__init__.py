"""The reference decoding engine: KV caches, drafting, lossless verification, counters."""
