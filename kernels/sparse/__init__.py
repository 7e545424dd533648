"""What ``sparse_step`` and ``sparse_carry`` share: a pass over the trace of a sparse weight."""
