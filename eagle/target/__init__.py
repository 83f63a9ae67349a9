"""The target: find it, load it, tap its hidden states, render its chat template, generate with it."""
