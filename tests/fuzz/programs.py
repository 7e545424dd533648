"""Random models as source text: a small grammar.

``program(seed)`` is a whole Python program: a model, the loss of a step, sequences, and the ways of
learning to compare (``CASES``). What is run is what is printed. Within a layer all values have one
shape, and nothing but ops connects positions, so that the oracle's dense Jacobians, restricted to
equal positions, are what the library promises. The oracle relies on one habit of the text: the new
value of state ``h`` is assigned to a variable ``new_h`` before it is stored.
"""

import ast
import random
from collections.abc import Collection

__all__ = ['FEATURES', 'program']

T, BATCH, N_IN = 5, 2, 3

FEATURES = (
    'control',  # cond, switch, scan, fori_loop, while, checkpoint, jit
    'environ',  # t, dt and keys of one's own, set by the caller in every step
    'layout',  # pieces, reshapes, transposes, scatters
    'lists',  # layers in a list, and not as attributes
    'noise',  # draws from generators
    'processing',  # of weights, before the op
    'spikes',  # surrogate gradients
    'states',  # a HiddenGroupState, a state that is no hidden one
    'tied',  # weights used twice
    'units',
    'unbatched',
)

HEAD = """
import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
from jax import checkpoint, jit, lax

from braintrace_fast import element_wise, matmul


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _(primals, tangents):
    return (spike(*primals), tangents[0] / (1 + jnp.abs(primals[0])) ** 2)


@jax.custom_vjp
def spike_(v):
    return (v > 0).astype(v.dtype)


spike_.defvjp(lambda v: (spike_(v), v), lambda v, ct: (ct / (1 + jnp.abs(v)) ** 2,))


def normal(seed, *shape):
    return jnp.asarray(0.6 * np.random.default_rng(seed).normal(size=shape))


def start(seed, batch, *shape):
    return normal(seed, *(() if batch is None else (batch,)), *shape)
"""

TAIL = """
if __name__ == '__main__':
    from tests.fuzz.check import show
    show(__file__)
"""

# Nothing grows by more than a factor from step to step, so that loops and rounding stay small.
UNARY = [
    'jnp.tanh({})',
    '0.7 * {}',
    'jax.nn.softplus({})',
    'jnp.tanh({}) ** 2',
    'jnp.clip({}, -1, 1)',
]
UNARY_OF = {
    'control': [
        'lax.cond(jnp.sum(x) > 0, jnp.sin, lambda v: 0.5 * v, {})',
        'lax.cond(jnp.sum({0}) > 0.1, lambda v, w: v * jnp.tanh(w), lambda v, w: v - w, {0}, {1})',
        'lax.switch(jnp.int32(9 * jnp.abs(x).sum()) % 3, [jnp.sin, jnp.cos, jnp.tanh], {})',
        'lax.scan(lambda v, k: (v - k * jnp.sin(v), v), {}, jnp.asarray([0.1, 0.2]))[0]',
        'lax.scan(lambda v, k: (v - k * jnp.sin(v), v), {}, jnp.asarray([0.1, 0.2]))[1][1]',
        'lax.fori_loop(0, 2, lambda i, v: 0.9 * jnp.sin(v) + 0.1 * i, {})',
        'lax.while_loop(lambda v: jnp.max(jnp.abs(v)) > 0.5, lambda v: 0.1 * v, {})',
        'lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, {}))[1]',
        'checkpoint(lambda v: v * jnp.tanh(v))({})',
        'checkpoint(lambda v, w: jax.nn.sigmoid(v) * w)({}, {})',
        'jit(jnp.sin)({})',
    ],
    'layout': [
        'jnp.concatenate([0.5 * {0}[..., :1], jnp.tanh({0}[..., 1:])], -1)',
        'jnp.sin({0}.reshape(-1)).reshape({0}.shape)',
        'jnp.tanh(({}).T).T',
        '{0}.at[..., :2].multiply(0.5)',
        'jnp.stack([{}, {}]).sum(0)',
        'jnp.stack([{0}, 0.3 * {1}], -1)[..., 1]',
        'jax.vmap(jnp.tanh)({})',
        'jnp.roll({}, 1, -1)',
    ],
    'spikes': ['spike({} - 0.3)', 'spike_({} - 0.3)', '({0} - 0.6 * spike({0} - 0.4))'],
}
BINARY = [
    '{} + {}',
    '{} - 0.5 * {}',
    'jnp.tanh({}) * {}',
    'jax.nn.sigmoid({}) * {}',
    'jnp.where({0} > 0, 0.5 * {0}, {1})',
    'jnp.maximum({}, {})',
]
PROCESSING = [
    '2.0 * {}',
    '{0} * (normal(1, *{0}.shape) > 0)',
    'jax.nn.softplus({})',
    'jnp.tanh({})',
    '({0} + 0.1 * {0} ** 2)',
    'jnp.where({0} > 0, {0}, 0.1 * {0})',
]
OPS_IN_CONTROL = [
    'checkpoint(lambda v: {op})({x})',
    'jit(lambda v: jnp.tanh({op}))({x})',
    'lax.cond(jnp.sum(x) > 0, lambda v: {op}, lambda v: 0.3 * {op}, {x})',
    'lax.scan(lambda a, k: (a * 0.5 + k * (lambda v: {op})({x}), None), {a}, '
    'jnp.asarray([0.3, 0.7]))[0]',
    'lax.fori_loop(0, 2, lambda i, a: 0.8 * a + jnp.tanh((lambda v: {op})({x})), {a})',
]
OPS_IN_CHAINS = [
    'lax.fori_loop(0, 2, lambda i, v: 0.5 * v + jnp.tanh({op}), {x})',
    'lax.scan(lambda v, k: (jnp.tanh({op}) - k * v, None), {x}, jnp.asarray([0.3, 0.7]))[0]',
]


class _Layer:
    """The lines of one layer's class."""

    def __init__(self, grammar: '_Grammar', index: int, n: int, width: int, same: bool) -> None:
        self.rng, self.on, self.index, self.n = grammar.rng, grammar.on, index, n
        self.init: list[str] = ['super().__init__()']
        self.states: list[str] = []
        self.body: list[str] = []
        self.weights: list[tuple[str, tuple[int, int]]] = []
        self.atoms = ['below'] if same else []  # values of the layer's shape
        self.parts = [('x', N_IN), ('below', width)]  # what ops may read
        self.numbers: list[str] = []
        self.planes: list[str] = []  # plain hidden states, for the loss to read

    def text(self) -> str:
        rng = self.rng
        self._reads()
        count = rng.choice([1, 1, 2, 2, 3, 4])
        self.grouped = 'states' in self.on and rng.random() < 0.4
        self.new = 'p' if self.grouped else 'new_h'
        units = ['', 'u.mV'] if 'units' in self.on and not self.grouped else ['']
        self.units = [rng.choice(units) for _ in range(count)]
        self._states(count)
        for _ in range(rng.choice([1, 1, 2])):
            self._op()
        later = [s for s in range(count) if not self._new_plane(s)]
        if self.grouped:
            self.body.append(f'new_h = jnp.stack([{", ".join(f"p{s}" for s in later)}], -1)')
            self.body.append('self.h.value = new_h')
            self.atoms.append(f'new_h[..., {count - 1}]')
        else:
            self.body += [self._store(s) for s in later]
        seen = [self.atoms[-1]]
        if rng.random() < 0.7:  # else some states may not matter
            seen = [f'{self.new}{s}' for s in range(count)]
        self.body.append(f'return {" + ".join([self._expression(1), *seen])}')
        return self._class()

    def _states(self, count: int) -> None:
        """Make the hidden states, and read them."""
        for s, unit in enumerate(self.units):
            if self.grouped:
                self.body.append(f'h{s} = self.h.value[..., {s}]')
                continue
            value = f'start(1{self.index}{s}, batch_size, {self.n})' + f' * {unit}' * bool(unit)
            self.states.append(f'self.h{s} = brainstate.HiddenState({value})')
            self.body.append(f'h{s} = self.h{s}.value' + f' / {unit}' * bool(unit))
            if not unit:
                self.planes.append(f'h{s}')
        if self.grouped:
            value = f'start(1{self.index}9, batch_size, {self.n}, {count})'
            self.states.append(f'self.h = brainstate.HiddenGroupState({value})')
        self.atoms += [f'h{s}' for s in range(count)]
        self.parts += [(f'h{s}', self.n) for s in range(count)]

    def _new_plane(self, s: int) -> bool:
        """Compute a new state, or plane of one; whether it is stored."""
        rng, new = self.rng, f'{self.new}{s}'
        terms = [f'{rng.choice([0.9, 0.5, -0.7])} * h{s}'] if rng.random() < 0.8 else []
        if s == 0 or rng.random() < 0.4:
            terms.append(f'y{rng.randrange(self.ops)}')
        if rng.random() < 0.9 or not terms:
            terms.append(self._expression(2))
        if len(terms) == 1 and terms[0] in self.atoms and not (s == 0 and terms[0].startswith('y')):
            terms = [f'1.0 * {terms[0]}']  # one variable for two states cannot be told apart
        if not self.grouped and rng.random() < 0.15:  # stored twice: the last one counts
            self.body.append(self._store(s, self._expression(1)))
        self.body.append(f'{new} = {" + ".join(terms)}')
        self.atoms.append(new)
        if rng.random() < 0.2:
            self.parts.append((new, self.n))
            self._op()
        is_stored = not self.grouped and rng.random() < 0.5
        if is_stored:
            self.body.append(self._store(s))
        return is_stored

    def _store(self, s: int, value: str = '') -> str:
        unit = f' * {self.units[s]}' * bool(self.units[s])
        return f'self.h{s}.value = ({value or f"new_h{s}"}){unit}'

    def _reads(self) -> None:
        """What a step reads besides its input and hidden states."""
        if 'environ' in self.on and self.rng.random() < 0.7:
            self.body.append("t = brainstate.environ.get('t') / u.ms")
            self.body.append("gain = brainstate.environ.get('gain')")
            self.body.append("dt = brainstate.environ.get('dt') / u.ms")
            self.numbers += ['jnp.cos(t)', 'gain', 'dt']
        if 'noise' in self.on:
            self.init.append(f'self.rng = brainstate.random.RandomState({self.index})')
            draw = self.rng.choice(['self.rng', 'brainstate.random'])
            self.body.append(f'noise = 0.3 * {draw}.normal(size=below.shape[:-1] + ({self.n},))')
            self.body.append(f'x = x * ({draw}.uniform(size=x.shape) < 0.7)')
            self.atoms.append('noise')
        if 'states' in self.on and self.rng.random() < 0.5:
            self.states.append('self.clock = brainstate.ShortTermState(jnp.zeros(()))')
            self.body.append('self.clock.value = self.clock.value + 1')
            self.numbers.append('1 / self.clock.value')

    @property
    def ops(self) -> int:
        return sum(line.startswith('y') for line in self.body)

    def _op(self) -> None:
        k, rng = self.ops, self.rng
        if rng.random() < 0.2:
            shape = rng.choice([f'{self.n}', f'{self.n}', ''])
            self.init.append(
                f'self.e{k} = brainstate.ParamState(normal(1{self.index}5{k}, {shape}))'
            )
            fn = rng.choice(['', '', ', weight_fn=jnp.abs'])
            mark = f'element_wise({self._processed(f"self.e{k}.value")}{fn})'
            self.body.append(f'y{k} = jnp.tanh({self._expression(1)}) * {mark}')
        else:
            parts = rng.sample(self.parts, min(len(self.parts), rng.choice([1, 1, 2, 2, 3])))
            x = f'jnp.concatenate([{", ".join(p for p, _ in parts)}], -1)'
            if len(parts) == 1:
                x = parts[0][0]
            if 'spikes' in self.on and rng.random() < 0.3:
                x = f'spike({x} - 0.2)'
            op = self._product(sum(w for _, w in parts), k)
            if 'control' in self.on and rng.random() < 0.5:
                chains = 4 * OPS_IN_CHAINS if x in self.atoms else []
                form, planes = rng.choice(OPS_IN_CONTROL + chains), set(self.atoms) - {'below'}
                line = form.format(op=op, x=x, a=rng.choice(sorted(planes)))
            else:
                line = op.replace('(v', f'({x}', 1)
            self.body.append(f'y{k} = {line}')
        self.atoms.append(f'y{k}')

    def _product(self, width: int, k: int) -> str:
        """A matmul of ``v``."""
        if 'units' not in self.on or self.rng.random() < 0.5:
            return f'matmul(v, {self._weight(width, k)})'
        value = f'normal(1{self.index}7{k}, {width}, {self.n}) * u.mS'
        self.init.append(f'self.w{k} = brainstate.ParamState({value})')
        return f'(matmul(v * u.mV, self.w{k}.value) / u.uA)'

    def _weight(self, width: int, k: int) -> str:
        """The weight of a matmul, and its bias if there is one."""
        rng, name = self.rng, f'self.w{k}'
        fits = [(w, s) for w, s in self.weights if s in ((width, self.n), (self.n, width))]
        if 'tied' in self.on and fits and rng.random() < 0.7:
            name, shape = rng.choice(fits)
            weight = f'{name}.value' if shape == (width, self.n) else f'{name}.value.T'
            return self._processed(weight)
        seed = f'1{self.index}7{k}'
        value, bias = f'normal({seed}, {width}, {self.n})', f'normal({seed}, {self.n})'
        if rng.random() < 0.2:
            value = f'dict(weight={value}, bias={bias})'
            self.init.append(f'{name} = brainstate.ParamState({value})')
            return self._processed(f"{name}.value['weight']") + f", {name}.value['bias']"
        self.init.append(f'{name} = brainstate.ParamState({value})')
        self.weights.append((name, (width, self.n)))
        if 'tied' in self.on and rng.random() < 0.2:  # two parameters in one weight
            self.init.append(f'{name}b = brainstate.ParamState(normal({seed}1, {width}, 1))')
            return f'{name}.value + {name}b.value'
        weight = self._processed(f'{name}.value')
        if rng.random() < 0.3:
            self.init.append(f'self.b{k} = brainstate.ParamState({bias})')
            weight += f', self.b{k}.value' + rng.choice(['', ', bias_fn=jnp.tanh'])
        elif rng.random() < 0.2:
            weight += ', weight_fn=jnp.abs'
        return weight

    def _processed(self, weight: str) -> str:
        rng = self.rng
        if 'processing' not in self.on or rng.random() < 0.3:
            return weight
        choices = [*PROCESSING, *(f'{number} * {{}}' for number in self.numbers)]
        if 'noise' in self.on:  # drawn outside of JAX's own transformations, which states dislike
            keep = f'keep{len(self.body)}'
            self.body.append(f'{keep} = self.rng.uniform(size={weight}.shape) < 0.7')
            choices += [f'{keep} * {{}}'] * 3
        return rng.choice(choices).format(weight)

    def _expression(self, depth: int) -> str:
        rng = self.rng
        kind = rng.choice(['atom', 'unary', 'binary', 'binary']) if depth else 'atom'
        if kind == 'atom':
            atom = rng.choice(self.atoms)
            has_factor = self.numbers and rng.random() < 0.2
            return f'{rng.choice(self.numbers)} * {atom}' if has_factor else atom
        if kind == 'unary':
            kinds = [UNARY, *(UNARY_OF[name] for name in UNARY_OF if name in self.on)]
            form = rng.choice(rng.choice(kinds))
        else:
            form = rng.choice(BINARY)
        if 'roll' in form and 'roll' in ''.join(self.body):  # two of them may meet in one position
            form = UNARY[0]
        return f'({form.format(*(f"({self._expression(depth - 1)})" for _ in "ab"))})'

    def _class(self) -> str:
        def lines(name: str, arguments: str, body: list[str]) -> str:
            return f'    def {name}(self, {arguments}):\n' + ''.join(f'        {b}\n' for b in body)

        return (
            f'class Layer{self.index}(brainstate.nn.Module):\n'
            + lines('__init__', '', self.init)
            + lines('init_state', 'batch_size=None, **_', self.states)
            + lines('update', 'x, below', self.body)
        )


class _Grammar:
    def __init__(self, seed: int, features: Collection[str]) -> None:
        self.rng = random.Random(seed)
        # Few features at a time: what goes wrong between two of them is not drowned by others.
        self.on = {f for f in FEATURES if self.rng.random() < 0.4} & set(features)

    def text(self) -> str:
        rng, classes, names, sizes = self.rng, [], [], [N_IN]
        first: list[str] = []
        for index in range(rng.choice([1, 1, 1, 1, 2, 2, 3])):
            n = rng.choice([3, 4])
            layer = _Layer(self, index, n, sizes[-1], same=n == sizes[-1])
            classes.append(layer.text())
            place = f'layers[{index}]' if 'lists' in self.on else f'layer{index}'
            names.append(place)
            first += [f'net.{place}.{plane}.value' for plane in layer.planes[:1]]
            sizes.append(n)
        return '\n\n'.join([HEAD, *classes, self._net(names), self._loss(first, sizes[-1])])

    def _net(self, names: list[str]) -> str:
        made = [f'Layer{i}()' for i in range(len(names))]
        init = [f'self.{name} = {m}' for name, m in zip(names, made, strict=True)]
        if 'lists' in self.on:
            init = [f'self.layers = [{", ".join(made)}]']
        skip = ' + x.sum(-1, keepdims=True)' if self.rng.random() < 0.2 else ''
        calls = ['below = x', *(f'below = self.{name}(x, below)' for name in names)]
        return (
            'class Net(brainstate.nn.Module):\n    def __init__(self):\n'
            '        super().__init__()\n'
            + ''.join(f'        {line}\n' for line in init)
            + '    def update(self, x):\n'
            + ''.join(f'        {line}\n' for line in calls)
            + f'        return below{skip}\n'
        )

    def _loss(self, first: list[str], n: int) -> str:
        rng = self.rng
        outside = rng.choice(['', f'readout=brainstate.ParamState(normal(3, {n}, 2))'])
        body = ['with environment(k):', '    out = run(x)']
        if 'environ' not in self.on:
            body = ['out = run(x)']
        readout = rng.choice(['out @ {}', 'matmul(jnp.tanh(out), {})']) if outside else 'out'
        body.append('z = ' + readout.format("outside['readout'].value"))
        losses = ['jnp.sum((z - target[..., :1]) ** 2)', 'jnp.sum(jnp.sin(z) * target[..., :1])']
        body.append(f'value = {rng.choice(losses)}')
        if first and rng.random() < 0.4:
            body.append(f'value = value + 0.3 * jnp.sum(jnp.sin({rng.choice(first)}))')
        if outside and rng.random() < 0.3:
            body.append("value = value + 0.1 * jnp.sum(outside['readout'].value ** 2)")
        body.append('return (value, dict(out=out))')
        batch = None if 'unbatched' in self.on else BATCH
        shape = (T, N_IN) if batch is None else (T, batch, N_IN)
        environment = 't=0.4 * k * u.ms, gain=jnp.sin(1.0 + k), dt=(0.1 + 0.1 * k) * u.ms'
        return (
            f'BATCH = {batch}\n'
            'def environment(k):\n'
            f'    return brainstate.environ.context({environment})\n'
            'def make():\n'
            f'    return (Net(), dict({outside}))\n'
            'def sequences():\n'
            f'    return (2 * normal(1, *{shape}), normal(2, *{shape}), jnp.arange({T}.0))\n'
            'def loss(run, net, outside, x, target, k):\n'
            + ''.join(f'    {line}\n' for line in body)
        )


def _cases(rng: random.Random, on: Collection[str], text: str) -> list[dict]:
    """Ways of learning: windows and steps by D-RTRL, and the same by another rule."""
    others = [
        dict(rule='pp_prop', options=dict(decay_or_rank=(0.8, 0.9))),
        dict(rule='eprop', options=dict(kappa_filter_decay=0.6)),
        dict(rule='eprop', options=dict(kappa_filter_decay=0.3, feedback='random')),
        dict(rule='three_factor', options={}),
    ]
    multi = 'environ' not in on and 'while_loop' not in text and 'jnp.sin(net.' not in text
    if multi:
        others.append(dict(rule='d_rtrl', options=dict(vjp_method='multi-step')))
    found = []
    for rule in [dict(rule='d_rtrl', options={}), rng.choice(others)]:
        if found and rng.random() < 0.6:
            break
        common = dict(
            mask=rng.choice([None, None, [0.0, 1.0, 2.0, 0.5, 1.0]]),
            trace=rng.choice(['carry', 'carry', 'fresh']),
            pieces=rng.choice([[T], [T], [T], [2, 3], [4, 1]]),
        )
        if 'feedback' in rule['options']:  # takes the direction of the loss, which a mask leaves
            common['mask'] = None
        windows = dict(reduction=rng.choice(['sum', 'mean']), jit=rng.random() < 0.9)
        if rule['options'].get('vjp_method'):
            chunks = dict(way='chunks', pieces=rng.choice([[4], [2, 2]]))
            found.append(rule | common | windows | chunks)
            continue
        ways = [
            windows | dict(way='windows', trace_every=rng.choice([None, 1, 2, 3])),
            dict(way=rng.choice(['steps', 'loop'])),
        ]
        found += [rule | common | way for way in rng.choice([ways, ways[:1], ways[:1], ways[1:]])]
    return found


def program(seed: int, features: Collection[str] = FEATURES) -> str:
    """The source of a program; the same for the same seed and features."""
    grammar = _Grammar(seed, features)
    text = grammar.text()
    cases = _cases(grammar.rng, grammar.on, text)
    text += '\nCASES = [' + ',\n'.join(map(repr, cases)) + ']\n'
    first = f'"""Seed {seed}. In the root of the repository: PYTHONPATH=. python this_file.py"""\n'
    return ast.unparse(ast.parse(first + text + TAIL)) + '\n'
