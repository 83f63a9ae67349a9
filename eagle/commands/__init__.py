"""Command modules: each holds one group of commands and is mounted by eagle/cli.py. They only wire."""
