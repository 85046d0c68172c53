"""The type of `layout.schedule`: the name of a schedule that jobs may have, as a `Literal` of all of them."""

from typing import Annotated, Any

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from fivefold.schedules import SCHEDULES


class _OneOfTheTable:
    """Reads the table when a value is checked, or its allowed values are listed."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(_known)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"enum": _names()}


def _names() -> list[str]:
    return [schedule.name for schedule in SCHEDULES.values() if schedule.use != "planning"]


def _known(value: Any) -> Any:
    if value not in _names():
        raise PydanticKnownError("literal_error", {"expected": " or ".join(map(repr, _names()))})
    return value


ScheduleName = Annotated[str, _OneOfTheTable()]
