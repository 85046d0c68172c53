"""What is trained on: from files to batches. `corpus.open_corpus` is the front door."""
