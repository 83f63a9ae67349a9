"""The contract with vLLM itself: our drafts, exported, loaded by vLLM, and their proposals compared token for token.

A few telling cases run in the normal suite; `python -m tests.contract` runs them all (minutes) and prints a table.
"""
