"""The plan's picture of one rank: what it holds, what it does, what it sends."""
