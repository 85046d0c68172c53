"""A `Job`: everything a training run needs to know, as one validated object.

A job comes from a preset, from a TOML file, and from `--section.key value` overrides, in rising
order of precedence. Nothing here imports torch: reading and refusing a job must be quick.

A job as the user wrote it leaves some numbers open (how many micro-batches, which data degree).
`resolve(job, ranks, device)` fills them in and is the only place that does; training, verification
and the planner see resolved jobs alone.

    schema.py      the sections and their keys
    read.py        file and overrides -> Job
    run_folder.py  the job files of a run's folder
    keys.py        what each key allows, in words
    complain.py    what is wrong with a value, in the user's words
    resolve.py     the open numbers filled in, the impossible refused
    local_steps.py what a job says of outer steps
    optimizers.py  what it says of its optimizer
    conditions.py  what `resolve` asks of a job and a search of many layouts
    write.py       Job -> TOML
    words.py       Job -> words of a command line
"""

from fivefold.config.read import by_key, job_with, load, setting_value, settings_in, sort_words
from fivefold.config.resolve import resolve
from fivefold.config.schema import (
    Checkpoint,
    Cluster,
    Communication,
    Data,
    DataSource,
    Job,
    LayoutSection,
    Model,
    Optimizer,
    Run,
    Training,
    list_keys,
    with_own_model,
)
from fivefold.config.words import as_words
from fivefold.config.write import dump_toml

__all__ = [
    "Checkpoint",
    "Cluster",
    "Communication",
    "Data",
    "DataSource",
    "Job",
    "LayoutSection",
    "Model",
    "Optimizer",
    "Run",
    "Training",
    "as_words",
    "by_key",
    "dump_toml",
    "job_with",
    "list_keys",
    "load",
    "resolve",
    "setting_value",
    "settings_in",
    "sort_words",
    "with_own_model",
]
