"""Fused operations of the draft, with their oracle. Imports torch and (when it is there) triton; knows nothing of `eagle`.

`dispatch` is what models call, `reference` is the oracle that every kernel is tested against, one module an op holds the
Triton code, `aot` compiles each kernel for a CUDA architecture without needing a GPU. Importing this package imports none
of them, so it works where triton does not exist.
"""
