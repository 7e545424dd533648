"""A compiled graph in words."""

import sys
from collections.abc import Mapping, Sequence
from typing import IO

import brainstate

from .._typing import Path
from .diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel
from .graph import ETraceGraph
from .hidden_group import HiddenGroup

__all__ = ['CompilationReport']

_ABOUT_ONE_RELATION = (
    DiagnosticKind.RELATION_INCLUDED,
    DiagnosticKind.RELATION_PARTIAL_PATH,
    DiagnosticKind.TAIL_NOT_POSITION_WISE,
    DiagnosticKind.WEIGHT_VARIES_IN_TIME,
)


class CompilationReport:
    """What was compiled: groups, traced weights, and why others are not traced.

    Parameters
    ----------
    graph : ETraceGraph
        The compiled graph.
    more : dict, optional
        Further sections, by title: lines of text.

    Examples
    --------
    >>> import brainstate, braintrace_fast as braintrace, jax.numpy as jnp
    >>> gru = braintrace.nn.GRUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(gru)
    >>> report = braintrace.CompilationReport(braintrace.compile_etrace_graph(gru, jnp.ones(3)))
    >>> report.etrace_weights
    [(('Wh', 'weight'), [0]), (('Wz', 'weight'), [0])]
    >>> report.excluded_weights
    [(('Wr', 'weight'), 'relation_excluded_weight_to_weight')]
    """

    def __init__(self, graph: ETraceGraph, more: Mapping[str, Sequence[str]] | None = None) -> None:
        self._graph = graph
        self._more = dict(more or {})

    @property
    def graph(self) -> ETraceGraph:
        """The graph reported on."""
        return self._graph

    @property
    def hidden_groups(self) -> list[tuple[int, list[Path]]]:
        """The groups, each as its index and the paths of its states."""
        return [(group.index, list(group.hidden_paths)) for group in self._graph.hidden_groups]

    @property
    def etrace_weights(self) -> list[tuple[Path, list[int]]]:
        """The traced parameters, each with the groups that it reaches."""
        groups: dict[Path, dict[int, None]] = {}
        for relation in self._graph.hidden_param_op_relations:
            for way in relation.weight_ways.values():
                for place in way.traced:
                    reached = groups.setdefault(way.paths[place], {})
                    reached.update(dict.fromkeys(g.index for g in relation.hidden_groups))
        return [(path, sorted(groups[path])) for path in self._weights() if path in groups]

    @property
    def excluded_weights(self) -> list[tuple[Path, str | None]]:
        """The parameters without any traced occurrence, each with the reason."""
        traced = {path for path, _ in self.etrace_weights}
        return [(path, self._reason(path)) for path in self._weights() if path not in traced]

    @property
    def dynamic_states(self) -> list[Path]:
        """Short-term states that belong to no group; the step carries them as they are."""
        states = self._graph.module_info.retrieved_model_states
        return [
            path
            for path, state in states.items()
            if isinstance(state, brainstate.ShortTermState)
            and path not in self._graph.hid_path_to_group
        ]

    @property
    def diagnostics(self) -> tuple[CompilationRecord, ...]:
        """All records, in order."""
        return self._graph.diagnostics

    @property
    def counts(self) -> dict[str, int]:
        """How many groups, weights, warnings and errors there are."""
        levels = [record.level for record in self.diagnostics]
        return {
            'hidden_groups': len(self._graph.hidden_groups),
            'etrace_weights': len(self.etrace_weights),
            'excluded_weights': len(self.excluded_weights),
            'warnings': levels.count(DiagnosticLevel.WARNING),
            'errors': levels.count(DiagnosticLevel.ERROR),
        }

    def to_str(self, level: int = 1) -> str:
        """The report as text.

        Parameters
        ----------
        level : {1, 2}
            1 for groups and weights; 2 for the warnings and errors as well.
        """
        if level not in (1, 2):
            raise ValueError(f'A report has levels 1 and 2, not {level!r}.')
        sections = [
            ('Hidden groups', [_describe_group(group) for group in self._graph.hidden_groups]),
            ('Carried states', [str(path) for path in self.dynamic_states]),
            ('Traced weights', self._describe_traced()),
            (
                'Weights without a trace',
                [self._describe_excluded(path, why) for path, why in self.excluded_weights],
            ),
        ]
        sections += [(title, list(lines)) for title, lines in self._more.items()]
        if level == 2:
            worrying = (DiagnosticLevel.WARNING, DiagnosticLevel.ERROR)
            notes = [f'[{r.level}] {r.message}' for r in self.diagnostics if r.level in worrying]
            sections.append(('Warnings and errors', notes))
        return '\n\n'.join(
            '\n'.join([title, *(f'  {line}' for line in lines)])
            for title, lines in sections
            if lines
        )

    def __call__(self, level: int = 1) -> str:
        """The same as :meth:`to_str`."""
        return self.to_str(level)

    def show(self, level: int = 1, *, file: IO[str] | None = None) -> None:
        """Print the report."""
        print(self.to_str(level), file=sys.stdout if file is None else file)

    def __repr__(self) -> str:
        counts = ', '.join(f'{name}={number}' for name, number in self.counts.items())
        return f'CompilationReport({counts})'

    def _weights(self) -> list[Path]:
        states = self._graph.module_info.retrieved_model_states
        return [p for p, state in states.items() if isinstance(state, brainstate.ParamState)]

    def _reason(self, path: Path) -> str | None:
        records = self._graph.explain(weight_path=path)
        kinds = [record.kind for record in records if record.kind not in _ABOUT_ONE_RELATION]
        return kinds[0].value if kinds else None

    def _describe_traced(self) -> list[str]:
        return [
            f'{path} -> group {", ".join(map(str, groups))}' for path, groups in self.etrace_weights
        ]

    def _describe_excluded(self, path: Path, why: str | None) -> str:
        messages = [r.message for r in self._graph.explain(weight_path=path)]
        return f'{path}: {messages[0] if messages else why}'


def _describe_group(group: HiddenGroup) -> str:
    names = ', '.join('.'.join(map(str, path)) for path in group.hidden_paths)
    entries = sum(map(sum, group.pattern))
    return (
        f'{group.index}: {names}; shape {group.varshape}, {group.num_state} planes, '
        f'{entries} of {group.num_state**2} entries of D'
    )
