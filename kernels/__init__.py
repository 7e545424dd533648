"""Accelerator kernels of braintrace_fast.

Import this package as ``braintrace_fast.kernels``, never by the name of its folder: a top-level
``kernels`` would clash with another package of that name. It imports nothing from the library.
"""
