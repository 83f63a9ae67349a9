"""Speculation measured through vLLM's OpenAI server: `eagle bench --engine vllm`."""
