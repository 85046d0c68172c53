"""Steps played event by event."""
