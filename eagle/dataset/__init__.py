"""The dataset step: prompts in (files, shipped, sampled from the target), conversations answered by the target out."""
