"""Where a model is trained: devices, and later the links between them."""
