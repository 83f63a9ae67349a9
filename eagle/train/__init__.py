"""Training of the draft: features, stage 1 (distill), stage 2 (policy), validation."""
