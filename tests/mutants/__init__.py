"""Bugs that are planted one by one, to see which the tests do not see: `make mutants`."""
