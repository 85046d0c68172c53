"""The verbs as Python functions: keyword arguments in, typed results out that print as short tables.

    planning.py    plan
    jobs.py        job
    simulation.py  simulate
    runs.py        train, verify
    metrics.py     read_metrics
    words.py       problems in Python's words

`fivefold/__init__.py` gives them to the user. What needs torch imports it when it is called.
"""
