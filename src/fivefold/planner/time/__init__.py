"""How long operations, messages and steps take."""
