"""The verbs of the command line, one a file. Each imports what it needs when it runs: torch takes seconds."""
