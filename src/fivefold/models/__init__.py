"""What is trained: model specifications, counts, and one plain decoder. No word of parallelism."""
