"""Ways to get the gradient of a sequence, each as a compiled function without arguments."""

from collections.abc import Callable
from typing import Any

import brainstate

import braintrace_fast

from .workloads import RecurrentSpikes, sequences, step_loss

__all__ = ['CONTENDERS', 'Gradient']

Gradient = Callable[[], Any]


def bptt(steps: int, batch: int, **sizes: int) -> Gradient:
    """Reverse mode through the same model."""
    model = RecurrentSpikes(braintrace_fast, **sizes)
    brainstate.nn.init_all_states(model, batch_size=batch)
    inputs = _inputs(steps, batch, sizes)
    loss = step_loss(model)

    def total() -> Any:
        return brainstate.transform.for_loop(loss, *inputs).mean()

    weights = model.states(brainstate.ParamState)
    return _from_start(model, lambda: brainstate.transform.grad(total, weights)())


def fast(algorithm: str, **options: Any) -> Callable[..., Gradient]:
    """A learner of this library."""

    def build(steps: int, batch: int, **sizes: int) -> Gradient:
        model = RecurrentSpikes(braintrace_fast, **sizes)
        inputs = _inputs(steps, batch, sizes)
        rule = {'decay_or_rank': 0.9} if algorithm == 'pp_prop' else {}
        learner = braintrace_fast.compile(model, algorithm, inputs[0][0], batch_size=batch, **rule)
        step = step_loss(learner)
        run = lambda: learner.etrace_grad(*inputs, step_fn=step, **options)  # noqa: E731
        return _from_start(model, run)

    return build


def reference(algorithm: str) -> Callable[..., Gradient]:
    """A learner of braintrace 0.2.6."""

    def build(steps: int, batch: int, **sizes: int) -> Gradient:
        import braintrace

        model = RecurrentSpikes(braintrace, **sizes)
        inputs = _inputs(steps, batch, sizes)
        brainstate.nn.init_all_states(model, batch_size=batch)
        if algorithm == 'pp_prop':
            learner = braintrace.pp_prop(model, 0.9)
        else:
            learner = braintrace.D_RTRL(model)
        learner.compile_graph(inputs[0][0])
        step = step_loss(learner)
        return _from_start(model, lambda: learner.etrace_grad(*inputs, step_fn=step))

    return build


def _inputs(steps: int, batch: int, sizes: dict[str, int]) -> Any:
    return sequences(steps, batch, **{k: sizes[k] for k in ('inputs', 'outputs') if k in sizes})


def _from_start(model: brainstate.nn.Module, run: Gradient) -> Gradient:
    """Compile a run that sets the hidden states to where they are now."""
    hidden = list(model.states(brainstate.HiddenState).values())
    start = [state.value for state in hidden]

    @brainstate.transform.jit
    def compiled() -> Any:
        for state, value in zip(hidden, start, strict=True):
            state.value = value
        return run()

    return compiled


CONTENDERS: dict[str, Callable[..., Gradient]] = {
    'bptt': bptt,
    'd_rtrl fresh': fast('d_rtrl', trace='fresh'),
    'd_rtrl carry': fast('d_rtrl'),
    'pp_prop': fast('pp_prop'),
    'braintrace pp_prop': reference('pp_prop'),
    'braintrace D_RTRL': reference('d_rtrl'),
}
