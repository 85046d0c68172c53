"""Checkpoints on disk: what is in them, how they are written, whole or not at all, which can be trusted."""
