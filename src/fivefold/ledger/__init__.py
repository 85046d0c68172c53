"""What one rank holds, does and sends, in numbers: of one layout, or of many at once (`setup.py`)."""
