"""How much memory the fullest rank needs; of many layouts at once, so in closed form."""
