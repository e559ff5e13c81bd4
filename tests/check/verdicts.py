"""What is said of a seed, and the world in which it is said."""

from dataclasses import dataclass

from slapo.verify.placement.offline import fake_world as fake_world


@dataclass(frozen=True)
class Verdict:
    """What was said of one seed: "equal" or "accepted", or how it went wrong."""

    seed: int
    said: str
    why: str = ""
    #: of mixed schedules: what was done, and ``(what, error)`` of what was refused
    done: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


def is_miss(said: Verdict, true: Verdict) -> bool:
    """Accepted, and wrong."""
    return said.said == "accepted" and true.said in ("wrong", "error")


def is_false_alarm(said: Verdict, true: Verdict) -> bool:
    """Refused, and right."""
    return said.said == "refused" and true.said == "equal"


def is_crash(said: Verdict, true: Verdict) -> bool:
    """Failed by an error that is no answer."""
    return "crash" in (said.said, true.said)
