"""Reasons for tests of ops, layers and the rest."""

from .reason import Reason

__all__ = ['REASONS']

REASONS: tuple[Reason, ...] = ()
