"""A registered version made again: its commit, its settings, its data, and what comes out beside what was registered."""
