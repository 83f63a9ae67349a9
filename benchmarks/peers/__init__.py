"""Peers side by side: other trainers' Eagle-3 drafts on the same data, draft size and training time (`make peers`)."""
