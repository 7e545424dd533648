"""A scan over the steps of a window, for a body that treats every position alike.

``scan(body, init, xs, like)`` is ``lax.scan(body, init, xs)`` with the state kept on chip: the ops
that walk a window (``adjoint_scan``, ``factored_trace``) give it the body of their reference.
"""
