"""What to run, what it will take, and why not otherwise."""
