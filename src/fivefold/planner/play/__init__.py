"""Steps of one layout, played event by event."""
