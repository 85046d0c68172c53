"""The planner against published runs of other programs, and how those programs differ from ours."""
