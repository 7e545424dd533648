"""Reasons for tests of the learners."""

from .reason import Reason

__all__ = ['REASONS']

REASONS: tuple[Reason, ...] = ()
