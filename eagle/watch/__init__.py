"""The drift watch: vLLM's counters over time against the reference in the bundle, with bounded false alarms."""
