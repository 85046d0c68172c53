"""A job as TOML, such that reading it back gives the same job."""

from fivefold.config.schema import Job
from fivefold.toml import toml_value


def dump_toml(job: Job, given: bool = False) -> str:
    """Every key that has a value, section by section. What is None is left out: it is None by default.

    given  only those that were given, and none that has its value by default
    """
    sections = job.model_dump(by_alias=True, exclude_none=True, exclude_unset=given)
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in section.items())
        for name, section in sections.items()
        if section
    )
