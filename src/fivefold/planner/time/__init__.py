"""How long operations, messages and steps take; steps in closed form, of many layouts at once."""
