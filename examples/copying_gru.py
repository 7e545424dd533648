"""The copying task: a GRU learns online to repeat what it saw before a delay.

A trial shows three symbols, then a run of blanks, then three recall marks. At each mark the network
must name the next symbol of the three. The marks are all alike, so the whole list has to be kept in
the hidden state.

    python examples/copying_gru.py --plot copying_gru.png
"""

from pathlib import Path

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
from common import make_learner, make_optimizer, parse_arguments, plot_frame, train

import braintrace_fast as braintrace

NUM_SYMBOLS = 4
LENGTH = 3
DELAY = 15
NUM_STEPS = 2 * LENGTH + DELAY
BLANK, RECALL = NUM_SYMBOLS, NUM_SYMBOLS + 1
NUM_INPUTS = NUM_SYMBOLS + 2
NUM_UNITS = 64
RECALLING = jnp.arange(NUM_STEPS) >= LENGTH + DELAY


def make_trials(key: jax.Array, num_trials: int) -> tuple[jax.Array, jax.Array]:
    """One-hot inputs of shape (step, trial, input), and the symbol to name at each step."""
    symbols = jax.random.randint(key, (LENGTH, num_trials), 0, NUM_SYMBOLS)
    blanks = jnp.full((DELAY, num_trials), BLANK)
    shown = jnp.concatenate([symbols, blanks, jnp.full_like(symbols, RECALL)])
    # Before the recall any target will do: the loss is masked there.
    targets = jnp.concatenate([symbols, jnp.zeros_like(blanks), symbols])
    return jax.nn.one_hot(shown, NUM_INPUTS), targets


class Network(brainstate.nn.Module):
    """A GRU and a linear readout."""

    def __init__(self):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(NUM_INPUTS, NUM_UNITS)
        self.readout = braintrace.nn.Linear(NUM_UNITS, NUM_SYMBOLS)

    def update(self, x):
        """One step, from an input to the logits of the symbols."""
        return self.readout(self.cell(x))


def plot(path: Path, accuracies: np.ndarray, inputs, targets, logits) -> None:
    """Draw the learning curve and one trial: inputs, and answers with their targets."""
    figure, right = plot_frame('One trial after training', accuracies, chance=1 / NUM_SYMBOLS)
    top, bottom = right.subplots(2, 1, sharex=True, height_ratios=[NUM_INPUTS, NUM_SYMBOLS])
    names = [*'ABCDEFGH'[:NUM_SYMBOLS], 'blank', 'recall']
    top.imshow(inputs.T, cmap='Greys', aspect='auto')
    top.set(ylabel='input', yticks=range(NUM_INPUTS), yticklabels=names)
    bottom.imshow(jax.nn.softmax(logits).T, cmap='Blues', vmin=0, vmax=1, aspect='auto')
    recall = np.arange(NUM_STEPS)[-LENGTH:]
    bottom.plot(recall, targets[recall], 'o', color='C1', fillstyle='none', label='target')
    bottom.set(ylabel='answer', yticks=range(NUM_SYMBOLS), yticklabels=names[:NUM_SYMBOLS])
    bottom.set(xlabel='step', xticks=range(0, NUM_STEPS, LENGTH))
    bottom.legend(loc='lower left')
    figure.savefig(path, dpi=130)


def main() -> None:
    """Train, and show what was learned."""
    args = parse_arguments(__doc__, updates=1000, learning_rate=5e-3, decay=0.9)
    brainstate.random.seed(args.seed)
    key = jax.random.key(args.seed)

    model = Network()
    learner = make_learner(model, args, jnp.zeros((args.batch_size, NUM_INPUTS)))
    optimizer = make_optimizer(learner, args)

    def step(x, targets):
        logits = learner(x)
        losses = braintools.metric.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean(), logits

    def accuracy(logits, targets):
        return jnp.mean(logits[-LENGTH:].argmax(axis=-1) == targets[-LENGTH:])

    @brainstate.transform.jit
    def update(key):
        inputs, targets = make_trials(key, args.batch_size)
        # A trial starts from a fresh state; this resets the learner's traces as well.
        brainstate.nn.reset_all_states(learner, batch_size=args.batch_size)
        grads, loss, logits = learner.etrace_grad(
            inputs,
            targets,
            step_fn=step,
            mask=RECALLING,
            has_aux=True,
            return_value=True,
            loss_output='scalar',
        )
        optimizer.update(grads)
        return loss, accuracy(logits, targets)

    @brainstate.transform.jit
    def test(key):
        inputs, targets = make_trials(key, args.batch_size)
        brainstate.nn.reset_all_states(model, batch_size=args.batch_size)
        logits = brainstate.transform.for_loop(model, inputs)
        return accuracy(logits, targets), (inputs, targets, logits)

    accuracies = train(update, test, key, args, chance=1 / NUM_SYMBOLS)
    if args.plot:
        _, batch = test(key)
        inputs, targets, logits = map(np.asarray, batch)
        # The trial with the most different symbols shows the most.
        trial = np.argmax([len({*symbols}) for symbols in targets[-LENGTH:].T])
        plot(args.plot, accuracies, inputs[:, trial], targets[:, trial], logits[:, trial])
        print(f'Wrote {args.plot}')


if __name__ == '__main__':
    main()
