"""What the examples share: the command line, the learner, learning, the training loop, plots."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import brainstate
import braintools
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from tqdm import tqdm

import braintrace_fast as braintrace


def parse_arguments(
    description: str,
    updates: int,
    learning_rate: float,
    decay: float,
    batch_size: int = 32,
    **flags: str,
) -> argparse.Namespace:
    """The options that all examples have, with defaults of their own; and flags with their help."""
    parser = argparse.ArgumentParser(
        description=description.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        '--algorithm', choices=['d_rtrl', 'pp_prop'], default='d_rtrl', help='the learning rule'
    )
    parser.add_argument(
        '--decay', type=float, default=decay, help="how slowly pp_prop's traces forget, below 1"
    )
    parser.add_argument(
        '--backend',
        choices=['auto', 'jax', 'pallas', 'interpret'],
        default='auto',
        help='what runs the traces',
    )
    parser.add_argument('--updates', type=int, default=updates, help='batches to train on')
    parser.add_argument('--batch-size', type=int, default=batch_size, help='trials per batch')
    parser.add_argument(
        '--test-trials', type=int, default=512, help='new trials to measure the accuracy on'
    )
    parser.add_argument(
        '--learning-rate', type=float, default=learning_rate, help="Adam's step size"
    )
    parser.add_argument('--seed', type=int, default=0, help='of the weights and of the trials')
    parser.add_argument(
        '--plot', metavar='PATH', type=Path, help='draw what was learned into this file'
    )
    for flag, about in flags.items():
        parser.add_argument(f'--{flag}', action='store_true', help=about)
    args = parser.parse_args()
    if min(args.updates, args.batch_size, args.test_trials) < 1:
        parser.error('--updates, --batch-size and --test-trials must be at least 1')
    if args.plot:
        # Made now, so that a folder that cannot be made is known before the training.
        args.plot.parent.mkdir(parents=True, exist_ok=True)
    return args


def make_learner(
    model: brainstate.nn.Module, args: argparse.Namespace, example_input: jax.Array
) -> braintrace.ETraceVjpAlgorithm:
    """Compile the model into an online learner, and print the report."""
    options = {'decay_or_rank': args.decay} if args.algorithm == 'pp_prop' else {}
    learner = braintrace.compile(
        model,
        args.algorithm,
        example_input,
        batch_size=args.batch_size,
        backend=args.backend,
        **options,
    )
    print(f'Compiled for {args.algorithm}, backend {learner.backend}\n')
    print(learner.report.to_str(), end='\n\n')
    return learner


def make_optimizer(
    learner: braintrace.ETraceVjpAlgorithm, args: argparse.Namespace
) -> braintools.optim.Adam:
    """Adam for all parameters of the learner."""
    optimizer = braintools.optim.Adam(args.learning_rate)
    optimizer.register_trainable_weights(learner.param_states)
    return optimizer


def learn_labels(
    learner: braintrace.ETraceVjpAlgorithm,
    optimizer: braintools.optim.Adam,
    inputs: jax.Array,
    labels: jax.Array,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Learn a label per trial from inputs of shape (step, trial, ...); the loss and the logits.

    The loss counts at every step: the network should know the label as early as it can.
    """

    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = learner(x)
        losses = braintools.metric.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), logits

    grads, loss, logits = learner.etrace_grad(
        inputs, step_fn=step, has_aux=True, return_value=True, loss_output='scalar', **options
    )
    optimizer.update(grads)
    return loss, logits


def accuracy_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The share of trials whose label has the largest logit, summed over the steps."""
    return jnp.mean(logits.sum(axis=0).argmax(axis=-1) == labels)


def train(
    update: Callable[[jax.Array], Any],
    test: Callable[[jax.Array], Any],
    key: jax.Array,
    args: argparse.Namespace,
    chance: float,
) -> np.ndarray:
    """Learn from new batches behind a progress bar, and print the accuracy before and after.

    ``update(key)`` learns from one batch and returns its loss and its accuracy before the update;
    ``test(key)`` returns the accuracy on one batch first. Returns the accuracies of the updates.
    """
    train_key, test_key = jax.random.split(key)
    test_keys = jax.random.split(test_key, math.ceil(args.test_trials / args.batch_size))

    def print_accuracy(when: str) -> None:
        mean = np.mean([test(key)[0] for key in test_keys])
        print(f'Accuracy on new trials {when} training: {mean:.1%} (chance: {chance:.0%})')

    print_accuracy('before')
    accuracies = []
    with tqdm(jax.random.split(train_key, args.updates), desc='training', unit='batch') as bar:
        for key in bar:
            loss, accuracy = map(float, update(key))
            accuracies.append(accuracy)
            bar.set_postfix(loss=f'{loss:.3f}', accuracy=f'{accuracy:.0%}')
    print_accuracy('after')
    return np.array(accuracies)


def plot_frame(title: str, accuracies: np.ndarray, chance: float) -> tuple[Figure, SubFigure]:
    """A figure with the learning curve at its left, and its right half to draw a trial into."""
    figure = plt.figure(figsize=(11, 5), layout='constrained')
    left, right = figure.subfigures(1, 2, width_ratios=[4, 5], wspace=0.04)
    left.suptitle('Learning online')
    right.suptitle(title)
    plot_learning_curve(left.subplots(), accuracies, chance)
    return figure, right


def plot_learning_curve(axes: Axes, accuracies: np.ndarray, chance: float) -> None:
    """Draw the accuracy of each batch, taken before it was learned from, and the running mean."""
    window = np.ones(min(10, len(accuracies)))
    # Divided by the batches that the window really covers, so that the ends are means too.
    covered = np.convolve(np.ones_like(accuracies), window, 'same')
    mean = np.convolve(accuracies, window, 'same') / covered
    batches = np.arange(1, len(accuracies) + 1)
    axes.plot(batches, 100 * accuracies, '.', color='0.7', label='each batch')
    axes.plot(batches, 100 * mean, color='C0', linewidth=2, label='running mean')
    axes.axhline(100 * chance, color='0.4', linestyle='--', linewidth=1, label='chance')
    axes.set(xlabel='batches of new trials', ylabel='accuracy (%)', ylim=(0, 104))
    axes.legend(loc='lower right', frameon=False)
    axes.spines[['top', 'right']].set_visible(False)


def plot_raster(axes: Axes, spikes: np.ndarray, colours: np.ndarray | str = '0.15') -> None:
    """Draw a tick for every spike of an array of shape (step, neuron)."""
    step, neuron = np.nonzero(spikes)
    colours = np.broadcast_to(colours, spikes.shape[1])
    axes.scatter(step, neuron, s=9, c=colours[neuron], marker='|', linewidths=1)
    axes.set(xlim=(0, len(spikes)), ylim=(-1, spikes.shape[1]))
