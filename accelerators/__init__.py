"""Checks of the kernels for GPUs and TPUs on a machine that has neither.

``python -m accelerators`` compiles every kernel for every device (:mod:`.gpu`, :mod:`.tpu`);
:mod:`.emulator` runs what a kernel for GPUs consists of, on the CPU.
"""
