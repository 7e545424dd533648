"""What a reason says."""

from typing import NamedTuple

__all__ = ['Reason']


class Reason(NamedTuple):
    """A reason, and the tests that it is for.

    Parameters
    ----------
    tests : str
        A test's identity, or a pattern with ``*``.
    text : str
        A sentence or two for the page.
    message : str
        What the error says, so that a test that fails in another way is noticed.
    """

    tests: str
    text: str
    message: str = ''
