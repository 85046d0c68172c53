"""Leaving a run's two job files in its folder (`config/run_folder.py` says what they are)."""

from pathlib import Path

from fivefold.config import Job
from fivefold.config.run_folder import job_files
from fivefold.storage.folder import replaced


def keep_jobs(folder: Path, asked: Job, resolved: Job) -> None:
    """Leave both in the run's folder, each whole or as it was before."""
    for name, text in job_files(asked, resolved).items():
        replaced(folder / name, text.encode())
