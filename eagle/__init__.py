"""Eagle 3.1 draft models for vLLM: data, training, measuring, packing, registering."""

__version__ = "0.1.0"
