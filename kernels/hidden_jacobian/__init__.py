"""How the new states of a group depend on its old ones and on the outputs of its ops."""

from .api import hidden_jacobian

__all__ = ['hidden_jacobian']
