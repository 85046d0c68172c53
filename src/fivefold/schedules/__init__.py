"""Pipeline schedules: each is one row of a table, with its order of computations."""

from fivefold.schedules.actions import Action, Kind
from fivefold.schedules.schedule import Schedule
from fivefold.schedules.table import ALONE, SCHEDULES, schedule_named

__all__ = ["ALONE", "SCHEDULES", "Action", "Kind", "Schedule", "schedule_named"]
