"""Measuring: what this machine really does."""
