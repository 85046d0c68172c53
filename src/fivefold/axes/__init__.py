"""How the work is split: each axis is one file with `check`, `split` and `account` side by side."""
