"""Why tests of the reference fail here: what is different on purpose, or not public."""

from . import compiler, learners, ops, rules
from .reason import Reason

__all__ = ['REASONS', 'Reason']

REASONS = learners.REASONS + rules.REASONS + compiler.REASONS + ops.REASONS
