"""Schedules as data: what a record keeps of arguments, and files of whole records."""

from slapo.record.keep import keep, made_by
from slapo.record.modules import ModuleSpec
from slapo.record.parts import Part, revive, walk
from slapo.record.schedule_record import ScheduleRecord

__all__ = ["ModuleSpec", "Part", "ScheduleRecord", "keep", "made_by", "revive", "walk"]
