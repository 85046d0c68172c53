"""One rank's step replayed on tensors that have a size and nothing else: what is alive, and when."""
