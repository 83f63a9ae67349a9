"""The draft network: its numbers (`spec`), the module (`model`), attention while training (`attention`), vocabulary map, files."""
