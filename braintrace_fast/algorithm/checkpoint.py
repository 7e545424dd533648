"""The whole state of a learner in a file of arrays and plain metadata.

The file is an uncompressed ``.npz`` without pickled objects: the arrays ``0``, ``1``, ... and
``meta``, JSON that says what each of them is.
"""

import hashlib
import inspect
import json
import os
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path as FilePath
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._typing import PyTree
from ..errors import CheckpointError
from ..runtime.links import links_of
from . import atomic_file
from .axes import ETraceConfig

__all__ = ['load', 'save']

FORMAT = 'braintrace_fast learner'
FORMAT_VERSION = 2
"""Version 1 had the planes of a trace by op and by group that it reaches, instead of by link."""

NESTED_PLANES = (
    re.compile(r"()\[(\d+)\]\[(\d+)\](\[\d+\]\['.*)"),
    re.compile(r'(\[1\])\[(\d+)\]\[(\d+)\](\[\d+\])'),
)
"""Names of planes in version 1: dictionaries of arrays, or one side of a factorised trace."""

NO_OPTIONS = (
    *('self', 'model', 'name', 'backend', 'control_flow', 'memory_budget', 'modulator'),
    *('fast_solve', 'chunked_trace', 'snap_max_jacobian_elements', 'couple_layers', 'scope'),
    'synthesizer',
)
"""Arguments of learners that a file need not agree with: they change nothing, or states tell."""

States = dict[str, brainstate.State]


def save(learner: Any, path: str | os.PathLike, others: Mapping[str, Any]) -> None:
    """Write the state of a learner, all or nothing."""
    arrays: dict[str, Any] = {}
    described: dict[str, Any] = {}
    for name, state in _states(learner, others).items():
        leaves = {}
        for key, leaf in _leaves(state.value).items():
            place = str(len(arrays))
            leaves[key] = {**_describe(leaf), 'array': place}
            arrays[place] = _stored(leaf)
        described[name] = leaves
    meta = {
        'format': FORMAT,
        'format_version': FORMAT_VERSION,
        'library_version': _library_version(),
        'memory_budget': learner.resolved_budget,
        **_rule(learner),
        'states': described,
    }
    text = json.dumps(meta).encode('utf-8')
    arrays['meta'] = np.frombuffer(text, np.uint8)
    atomic_file.write(path, lambda file: np.savez(file, **arrays))


def load(learner: Any, path: str | os.PathLike, others: Mapping[str, Any]) -> None:
    """Read the state of a learner; nothing changes unless all of it fits."""
    meta, arrays = _read(FilePath(path))
    states = _states(learner, others)
    like = {name: state.value for name, state in states.items()}
    trace = next(name for name, state in states.items() if state is learner.trace)
    if meta['format_version'] == 1 and trace in meta['states']:
        meta['states'][trace] = _by_link(meta['states'][trace], learner)
    like[trace] = _form_of_trace(learner, meta['states'].get(trace, {}))
    if 'config' not in meta['options']:
        meta['options']['config'] = _plain(_before_configs(learner.config))
    problems = _differences(learner, meta, like)
    if problems:
        shown = '\n'.join(f'- {problem}' for problem in problems[:20])
        more = f'\n- and {len(problems) - 20} more' if len(problems) > 20 else ''
        raise CheckpointError(
            f'{path} holds the state of another learner. Nothing was changed.\n{shown}{more}'
        )
    values = {
        name: _restored(value, meta['states'][name], arrays, path) for name, value in like.items()
    }
    values[trace] = jax.device_put(learner.engine.fit(values[trace]))
    for name, state in states.items():
        state.restore_value(values[name])
    if learner.memory_budget is None:  # other windows would round otherwise
        learner.resolved_budget = meta['memory_budget']


def _states(learner: Any, others: Mapping[str, Any]) -> States:
    """All states by a name that is unique and does not depend on the run."""
    model = {**learner.model.states(), **learner.graph_executor.first_states}
    named = {_name('model', path): state for path, state in model.items()}
    own = {id(state) for state in learner.own_states}
    named |= {_name('learner', (k,)): s for k, s in vars(learner).items() if id(s) in own}
    for key, other in others.items():
        given = {(): other} if isinstance(other, brainstate.State) else _nested(other)
        named |= {_name('others', (key, *path)): state for path, state in given.items()}
    unique: dict[int, tuple[str, brainstate.State]] = {}
    for name, state in named.items():
        unique.setdefault(id(state), (name, state))
    return dict(unique.values())


def _nested(other: Any) -> dict[tuple, brainstate.State]:
    if isinstance(other, brainstate.graph.Node) and not isinstance(other, brainstate.nn.Module):
        return dict(brainstate.graph.states(other).items())  # an optimiser
    states: Any = other.states() if isinstance(other, brainstate.nn.Module) else other
    flat, _ = jax.tree.flatten_with_path(
        dict(states), is_leaf=lambda x: isinstance(x, brainstate.State)
    )
    wrong = {type(state).__name__ for _, state in flat if not isinstance(state, brainstate.State)}
    if wrong:
        raise TypeError(f'others has {sorted(wrong)}; expected states, modules or dicts of states.')
    return {(jax.tree_util.keystr(path),): state for path, state in flat}


def _name(kind: str, path: tuple) -> str:
    return kind + ' ' + json.dumps([p if isinstance(p, int | str) else repr(p) for p in path])


def _leaves(value: PyTree) -> dict[str, Any]:
    flat, _ = jax.tree.flatten_with_path(value, is_leaf=_is_quantity)
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


def _is_quantity(value: Any) -> bool:
    return isinstance(value, u.Quantity)


def _describe(leaf: Any) -> dict[str, Any]:
    array = u.get_mantissa(leaf)
    unit = u.get_unit(leaf)
    described = {
        'shape': list(jnp.shape(array)),
        'dtype': str(jnp.result_type(array)),
        'unit': '' if unit.is_unitless else str(unit),
    }
    if not unit.is_unitless:
        described['scale'] = repr((unit.scale, unit.base, unit.factor))
    return described


def _is_key(array: Any) -> bool:
    return isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _stored(leaf: Any) -> np.ndarray:
    array = u.get_mantissa(leaf)
    if isinstance(array, jax.core.Tracer):
        raise ValueError('A learner cannot be saved inside jit or another transformation.')
    if isinstance(array, bool | int | float):  # in full, as Python computes with it
        return np.asarray(array)
    stored = np.asarray(jax.random.key_data(array) if _is_key(array) else jnp.asarray(array))
    if stored.dtype.kind not in 'biufc':  # bfloat16 and its like, which NumPy does not know
        stored = stored.view(np.dtype(f'u{stored.dtype.itemsize}'))
    return stored


def _restored(value: PyTree, described: Any, arrays: Mapping[str, Any], path: Any) -> PyTree:
    flat, tree = jax.tree.flatten_with_path(value, is_leaf=_is_quantity)
    new = []
    for key, leaf in flat:
        entry = described[jax.tree_util.keystr(key)]
        array = u.get_mantissa(leaf)
        expected = _stored(leaf)
        stored = arrays.get(entry['array'])
        if stored is not None and not stored.ndim and stored.dtype.kind == expected.dtype.kind:
            stored = stored.astype(expected.dtype)  # a Python number may since be an array
        if stored is None or (stored.shape, stored.dtype) != (expected.shape, expected.dtype):
            raise CheckpointError(f'{path} is damaged: array {entry["array"]} is not as described.')
        if _is_key(array):
            restored: Any = jax.random.wrap_key_data(stored, impl=jax.random.key_impl(array))
        elif not isinstance(array, jax.Array | np.ndarray):
            restored = type(array)(stored.item())
        else:
            restored = np.ascontiguousarray(stored).view(jnp.result_type(array))
            restored = restored.reshape(expected.shape)
        if isinstance(array, jax.Array):
            if jax.typeof(array).weak_type and not array.ndim:
                weak = jnp.asarray(restored.item())
                restored = weak if weak.dtype == array.dtype else restored
            restored = jax.device_put(restored, array.sharding)
        new.append(u.Quantity(restored, unit=leaf.unit) if _is_quantity(leaf) else restored)
    return jax.tree.unflatten(tree, new)


def _rule(learner: Any) -> dict[str, Any]:
    """The learning rule and its options, as text."""
    names = inspect.signature(type(learner).__init__).parameters
    options = {k: getattr(learner, k) for k in names if k not in NO_OPTIONS and hasattr(learner, k)}
    options |= learner.resolved_options
    plain = {k: _plain(value) for k, value in options.items()}
    return {'algorithm': type(learner).__name__, 'options': plain}


def _before_configs(config: ETraceConfig) -> ETraceConfig:
    """What a learner of the same class and options was before it could be configured."""
    decay = config.decay if config.is_factorized else None
    return config.replace(
        temporal_recursion='jacobian', recurrence_scope='diagonal', decay=decay, sparse_n=None
    )


def _plain(value: Any) -> str:
    if isinstance(value, ETraceConfig):
        return value.describe()
    if isinstance(value, type) and issubclass(value, np.generic):
        return str(np.dtype(value))
    if isinstance(value, np.dtype):
        return str(value)
    if isinstance(value, np.ndarray | jax.Array):
        digest = hashlib.sha256(_stored(value).tobytes()).hexdigest()[:16]
        return f'{value.dtype}{list(value.shape)} with digest {digest}'
    if callable(value):
        return getattr(value, '__qualname__', type(value).__qualname__)
    text = repr(value)
    return type(value).__qualname__ if ' at 0x' in text else text


def _by_link(stored: Mapping[str, Any], learner: Any) -> dict[str, Any]:
    """The parts of a trace of format version 1, by link."""
    places: dict[tuple[int, int], int] = {}
    for link in links_of(learner.graph):
        places[link.op, sum(op == link.op for op, _ in places)] = link.index

    def renamed(key: str) -> str:
        for form in NESTED_PLANES:
            match = form.fullmatch(key)
            if match is not None:
                side, op, place, plane = match.groups()
                return f'{side}[{places.get((int(op), int(place)))}]{plane}'
        return key

    return {renamed(key): leaf for key, leaf in stored.items()}


def _form_of_trace(learner: Any, stored: Mapping[str, Any]) -> PyTree:
    """A trace like the stored one, which another backend may have kept in another form."""
    own = learner.trace.value
    if not _leaf_differences(own, stored):
        return own
    forms = [
        jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
        for shapes in learner.engine.stored_shapes()
    ]
    return next((form for form in forms if not _leaf_differences(form, stored)), own)


def _differences(learner: Any, meta: Mapping[str, Any], values: Mapping[str, PyTree]) -> list[str]:
    rule = _rule(learner)
    problems = []
    if meta['algorithm'] != rule['algorithm']:
        problems.append(f'the algorithm is {meta["algorithm"]}, here {rule["algorithm"]}')
    else:
        for key in sorted({*meta['options'], *rule['options']} - {*NO_OPTIONS}):
            # What a file lacks did not exist when it was written, and is None by default.
            there, here = meta['options'].get(key, 'None'), rule['options'].get(key, 'None')
            if there != here:
                problems.append(f'the option {key} is {there}, here {here}')
    stored = meta['states']
    problems += [f'the state {name} is missing' for name in values if name not in stored]
    problems += [f'there is a state {name}, and none here' for name in stored if name not in values]
    for name, value in values.items():
        if name in stored:
            problems += [f'{name}{text}' for text in _leaf_differences(value, stored[name])]
    return problems


def _leaf_differences(value: PyTree, stored: Mapping[str, Any]) -> list[str]:
    here = {key: _describe(leaf) for key, leaf in _leaves(value).items()}
    if here.keys() != stored.keys():
        return [f' has the parts {sorted(stored)}, here {sorted(here)}']
    differences = []
    for key, described in here.items():
        there = {k: v for k, v in stored[key].items() if k != 'array'}
        for what in ('shape', 'dtype', 'unit', 'scale'):
            if there.get(what) != described.get(what):
                was, now = there.get(what), described.get(what)
                differences.append(f'{key}: the {what} is {was}, here {now}')
    return differences


def _read(path: FilePath) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        with open(path, 'rb') as handle:
            file = np.load(handle, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise _unreadable(path)
            with file:
                arrays = {key: file[key] for key in file.files}
        meta = json.loads(arrays.pop('meta').tobytes().decode('utf-8'))
    except (CheckpointError, FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:  # damaged archives raise errors of many kinds
        raise _unreadable(path) from error
    if not isinstance(meta, dict) or meta.get('format') != FORMAT:
        raise CheckpointError(f'{path} was not written by learner.save(path).')
    written = meta.get('format_version')
    if isinstance(written, int) and written > FORMAT_VERSION:
        raise CheckpointError(
            f'{path} has format version {written}, written by braintrace_fast '
            f'{meta.get("library_version")}; this is {_library_version()}, which reads up to '
            f'{FORMAT_VERSION}. Install the newer library.'
        )
    wrong = _wrong_parts(meta)
    if wrong:
        raise CheckpointError(
            f'{path} is damaged: {", ".join(wrong)} in its metadata is missing or malformed. '
            'Nothing was changed.'
        )
    return meta, arrays


def _wrong_parts(meta: Mapping[str, Any]) -> list[str]:
    """The parts of the metadata that are not there, or not of the form that is written."""
    kinds = {
        'format_version': int,
        'memory_budget': int,
        'algorithm': str,
        'options': dict,
        'states': dict,
    }
    wrong = [key for key, kind in kinds.items() if type(meta.get(key)) is not kind]
    if 'memory_budget' not in wrong and meta['memory_budget'] < 1:
        wrong.append('memory_budget')
    if 'states' not in wrong and not all(map(_is_state, meta['states'].values())):
        wrong.append('states')
    return wrong


def _is_state(leaves: Any) -> bool:
    return isinstance(leaves, dict) and all(
        isinstance(leaf, dict) and isinstance(leaf.get('array'), str) for leaf in leaves.values()
    )


def _unreadable(path: FilePath) -> CheckpointError:
    return CheckpointError(
        f'{path} is truncated or damaged, or was not written by learner.save(path).'
    )


def _library_version() -> str:
    try:
        return version('braintrace-fast')
    except PackageNotFoundError:
        return 'unknown'
