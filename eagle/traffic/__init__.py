"""Prompts from request logs of an OpenAI-compatible server, without what must not be trained on."""
