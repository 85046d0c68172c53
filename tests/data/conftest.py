"""Properties are checked without a time limit: a busy machine is not a bug."""

from hypothesis import settings

settings.register_profile("data", deadline=None, max_examples=40)
settings.load_profile("data")
