"""Which layout, how long a step, how much memory and money, before anything runs.

`request.py`, `goal.py` and `answer.py` are what was asked, what is searched for and what was found; `search/`
and `time/`, `memory/` and `play/` find it. The other files are a verb or an option each.
"""
