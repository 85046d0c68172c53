"""Showing: tables, pictures and traces of what was planned or measured."""
