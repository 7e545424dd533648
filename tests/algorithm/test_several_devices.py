"""A learner whose batch is split over eight devices gives the gradients of one device."""

import pytest

from tests.programs import ROOT, run_on_eight_devices


@pytest.mark.slow
@pytest.mark.parametrize('rule', ['d_rtrl', 'pp_prop'])
def test_gradients_are_those_of_one_device(rule):
    run_on_eight_devices('sharded_learner', rule)


def test_the_examples_of_the_documentation_run():
    run_on_eight_devices('documented_devices', ROOT / 'docs' / 'devices.md')
