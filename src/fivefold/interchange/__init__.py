"""Hugging Face weights in and out: which tensor of theirs is which of ours, read and written as a stream."""
