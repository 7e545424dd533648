"""The trace of a sparse weight across one step; its entry point is ``trace_step``."""
