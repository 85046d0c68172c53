"""`fivefold keys`"""

from dataclasses import asdict
from typing import Annotated

import typer

from fivefold.commands.common import AsJson, print_json, print_table, reporting, show_default
from fivefold.problems import BadInput, Problem, did_you_mean


def keys(
    section: Annotated[str | None, typer.Argument(help="Only this section.")] = None, as_json: AsJson = False
) -> None:
    """List the settings of a job, with what each allows and means."""
    from fivefold.config import Job, list_keys

    with reporting(as_json):
        found = [key for key in list_keys() if section is None or key.name.startswith(f"{section}.")]
        if not found:
            hint = did_you_mean(section or "", Job.model_fields)
            raise BadInput([Problem(section or "", "there is no such section", hint)])
        if as_json:
            print_json({key.name: asdict(key) for key in found})
            return
        rows = [(key.name, show_default(key.default), key.allowed, key.description) for key in found]
        print_table(("key", "default", "allowed", "meaning"), rows)
