"""Serving with vLLM: the exact command."""
