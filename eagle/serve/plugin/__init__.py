"""What runs inside vLLM, under vLLM's own interpreter: the draft length controller as a scheduler class.

Nothing here may import what vLLM's environment lacks: only the standard library, pydantic, prometheus_client, vLLM itself
(`scheduler.py`) and this project's pure modules `eagle.decode.{control,cost,survival}`.
"""
