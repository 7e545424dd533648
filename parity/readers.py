"""Helpers by which tests of the reference read jaxprs; those that test them are about internals."""

from typing import Any

__all__ = ['READERS', 'jaxpr_all_invars', 'jaxpr_constvars', 'split_jaxpr_invars']


def jaxpr_all_invars(jaxpr: Any) -> list[Any]:
    """The inputs of a jaxpr, those of its constants first."""
    return [*jaxpr.constvars, *jaxpr.invars]


def split_jaxpr_invars(jaxpr: Any, num_invars: int) -> tuple[list[Any], list[Any]]:
    """The same without its last so many, and these."""
    every = jaxpr_all_invars(jaxpr)
    return every[: len(every) - num_invars], every[len(every) - num_invars :]


def jaxpr_constvars(jaxpr: Any, num_invars: int) -> list[Any]:
    """The inputs of a jaxpr but its last so many."""
    return split_jaxpr_invars(jaxpr, num_invars)[0]


READERS = {
    f'braintrace._compatible_imports.{function.__name__}': f'{__name__}:{function.__name__}'
    for function in (jaxpr_all_invars, jaxpr_constvars, split_jaxpr_invars)
}
"""By ``module.name`` of the reference, ``module:name`` of this file."""
