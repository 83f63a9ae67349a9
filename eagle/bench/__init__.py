"""Measurement: tuning for this machine, paired benchmarks, tables and plots."""
