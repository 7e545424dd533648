"""The traces of ops whose weight Jacobian is an outer product, tile by tile.

``trace_step`` and ``trace_carry`` are one pass over such a trace: each plane is read, decayed,
added to and written back in place, and a signal reads it on the way. They differ in how many steps
they add.
"""
