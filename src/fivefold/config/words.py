"""A job as words of a command line, such that reading them back gives the same job."""

from fivefold.config.read import setting_value
from fivefold.config.schema import Job
from fivefold.toml import toml_value


def as_words(job: Job) -> list[str]:
    """Settings, `--section.key=value`: every key that was given."""
    sections = job.model_dump(by_alias=True, exclude_none=True, exclude_unset=True)
    return [
        f"--{name}.{key}={_word(f'{name}.{key}', value)}"
        for name, section in sections.items()
        for key, value in section.items()
    ]


def _word(key: str, value: object) -> str:
    """A value as it is typed: text without quotes, where it is read as that text."""
    plain = isinstance(value, str) and setting_value(key, value) == value
    return str(value) if plain else toml_value(value)
