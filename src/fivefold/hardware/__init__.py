"""Where a model is trained: devices, and the links between them."""
