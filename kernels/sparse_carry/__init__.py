"""The trace of a sparse weight across a window; its entry point is ``trace_carry``."""
