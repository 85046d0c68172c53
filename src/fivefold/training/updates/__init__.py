"""Update rules: how masters move by their gradients. `update.py` says what each has to have."""
