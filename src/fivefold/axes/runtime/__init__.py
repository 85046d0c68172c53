"""What only ranks run: the splits, and the layers that take the place of a model's. Imports torch."""
