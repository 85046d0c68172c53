"""The planner against published runs of other programs."""
