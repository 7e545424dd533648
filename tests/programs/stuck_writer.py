"""Starts to save to the path that is given, says so, and waits in the middle of it."""

import os
import sys
import time

from braintrace_fast.algorithm import atomic_file


def write(file):
    file.write(bytes(1000))
    print('writing', flush=True)
    time.sleep(600)


if __name__ == '__main__':
    atomic_file.write(os.fspath(sys.argv[1]), write)
