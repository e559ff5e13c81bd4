"""Exceptions of this library; wrong arguments are ``ValueError``, ``KeyError`` or ``TypeError``."""


class SlapoError(RuntimeError):
    """A schedule that cannot be carried out in the present state of model or machine."""


class TraceError(SlapoError):
    """A module that cannot be turned into a graph; the message says why and what to pass."""


class VerificationError(SlapoError):
    """A schedule that changed what the model computes, found by :class:`slapo.Verify`."""


class MissingPackageError(SlapoError, ImportError):
    """An optional package that a feature needs is not installed."""
