"""Finding the best layouts."""
