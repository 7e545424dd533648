"""Benchmarks: ratios to peers in one process, printed only after the gradients were checked."""
