"""How the work is split. An axis is a pair of files: `X.py` has its rules and messages, without torch, and
`runtime/X_split.py` its split, which only ranks run.
"""
