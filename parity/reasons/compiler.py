"""Reasons for tests of the compiler."""

from .reason import Reason

__all__ = ['REASONS']

REASONS: tuple[Reason, ...] = ()
