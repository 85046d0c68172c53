"""Who does what in a run: the ranks' heartbeats, and the doctor that reads them."""
