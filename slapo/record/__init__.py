"""Schedules as data: recorded arguments, and files of full records."""

from slapo.record.keep import keep, made_by
from slapo.record.modules import ModuleSpec
from slapo.record.parts import Part, revive, walk
from slapo.record.schedule_record import ScheduleRecord

__all__ = ["ModuleSpec", "Part", "ScheduleRecord", "keep", "made_by", "revive", "walk"]
