"""What tests of kernels share: an exact reference, comparison with it, and lowering."""

import contextlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np

GPU = jax.sharding.AbstractDevice('NVIDIA H100 80GB HBM3', 132, 'gpu')
CALLS = {'cuda': '__gpu$xla.gpu.triton', 'tpu': 'tpu_custom_call'}


def exact(f, *operands):
    """What ``f`` gives in float64 for the same values."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, f(*jax.tree.map(_widened, operands)))


def _widened(a):
    """Numbers that are no places in float64."""
    a = np.asarray(a)
    return jnp.asarray(a if np.issubdtype(a.dtype, np.integer) else a.astype('float64'))


def assert_close(found, wanted, values):
    """Structures, shapes and dtypes as ``wanted``; values as the exact ``values``.

    The error allowed is the rounding of the result plus that of float32 at the scale of the plane,
    so that a kernel that accumulates in bfloat16 fails.
    """
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert_rounded(found, values)


def assert_rounded(found, values):
    """Values as the exact ones, but for rounding."""
    for a, value in zip(jax.tree.leaves(found), jax.tree.leaves(values), strict=True):
        scale = np.max(np.abs(value), initial=0.0)
        allowed = float(jnp.finfo(a.dtype).eps) * np.abs(value) + 1e-5 * scale
        error = np.abs(np.asarray(a, 'float64') - value)
        assert np.all(error <= allowed), np.max(error / (allowed + 1e-30))


def assert_drawn_alike(found, wanted):
    """Values in bfloat16 that were rounded by the same random numbers."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = (np.asarray(leaf, 'float32') for leaf in (a, b))
        assert np.mean(a != b) < 0.01  # where float32 differs in the last bit, so may the draw
        np.testing.assert_allclose(a, b, rtol=2**-7)


def as_planes(like, values):
    """Dense values, as a naive definition gives them, in the structure of planes.

    Where there is no plane, there must be nothing but zeros.
    """
    if like is None:
        leaves = jax.tree.leaves(values)
        assert not any(np.any(value) for value in leaves)
        return None
    if isinstance(like, dict):
        return {name: as_planes(plane, values[name]) for name, plane in like.items()}
    if isinstance(like, tuple | list):
        return [as_planes(*pair) for pair in zip(like, values, strict=True)]
    return values


def assert_naive(found, values):
    """Planes are as a naive definition in float64 says."""
    assert_rounded(found, as_planes(found, values))


@contextlib.contextmanager
def absent(platform, **axes):
    """Trace and lower inside for a platform that is not here, with the given sizes of axes."""
    axes = axes or {'device': 1}
    mesh = jax.sharding.AbstractMesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
        abstract_device=GPU if platform == 'cuda' else None,  # jax 0.12 asks for it
    )
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        # jax 0.12 announces the end of Pallas for Triton, and ships it.
        warnings.filterwarnings('ignore', 'The Pallas Triton backend', DeprecationWarning)
        yield


def lowered(f, *operands, platform, **axes):
    """The module for a platform that is not here, under a mesh of the given sizes of axes."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), operands)
    with absent(platform, **axes):
        return jax.jit(f).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


def count_calls(text, platform):
    """How many kernels a lowered module has."""
    return text.count(f'@{CALLS[platform]}(')


def called(text, platform):
    """The names of the kernels that a lowered module has."""
    lines = [line for line in text.splitlines() if f'@{CALLS[platform]}(' in line]
    return [re.search(r'\b(?:kernel_)?name = "(\w+)"', line)[1] for line in lines]


def three_steps(run, x, D, f, signal, trace):
    """A batch of three steps of a trace, from one and the same."""

    def body(trace, _):
        new, read = jax.vmap(run)(x, D, f, trace, signal)
        return list(new), read

    start = list(jax.vmap(run, in_axes=(0, 0, 0, None, 0))(x, D, f, trace, signal)[0])
    return jax.lax.scan(body, start, length=2)


def race_message(run, capfd):
    """What TPU's interpreter says of races: jax 0.12 raises what jax 0.10 prints."""
    try:
        jax.block_until_ready(run())
    except Exception as error:
        return str(error).lower()
    return capfd.readouterr().out.lower()
