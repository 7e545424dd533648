"""Trains from a file, if there is one, to the end; with ``kill``, saves and dies before that."""

import os
import signal
import sys

import brainstate
import numpy as np
import saiunit as u

from tests.algorithm.test_save_load import XS, everything, new_learner, train


def main(path, result, kill=''):
    learner = new_learner()
    if os.path.exists(path):
        brainstate.random.seed(5)
        learner.load(path)
    for step in range(4):
        train(learner, 1)
        print(int(learner.running_index.value), flush=True)
        if kill and step == 1:
            learner.save(path)
        if kill and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if int(learner.running_index.value) == 4 * len(XS):
            break
    np.savez(result, *everything(learner))


if __name__ == '__main__':
    with brainstate.environ.context(dt=0.1 * u.ms):
        brainstate.random.seed(0)
        main(*sys.argv[1:])
