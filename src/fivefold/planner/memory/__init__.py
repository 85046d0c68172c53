"""How much memory the fullest rank needs."""
