"""Reasons for tests of learning rules and of whole gradients."""

from .reason import Reason

__all__ = ['REASONS']

REASONS: tuple[Reason, ...] = ()
