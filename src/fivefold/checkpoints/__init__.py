"""Checkpoints on disk: what is in them, how they are written whole or not at all, and which can be trusted."""
