"""The vLLM-ready draft bundle: export, static check, model card, validation in vLLM."""
