"""What was counted: a table by file, and why each test that fails does."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from .examples import examples_section
from .reasons import REASONS, Reason
from .run import Outcome

__all__ = ['Counts', 'as_page', 'as_table', 'check_reasons', 'count']

HEADER = ('file', 'passed', 'failed', 'skipped', 'internals', 'share')
BAR = 0.9

PREAMBLE = """# braintrace's own tests, run here

Made by `make parity`, which downloads the source distribution of braintrace 0.2.6 and runs its
tests with `braintrace` meaning this library. A test counts if it asks for public behaviour. It is
*about internals* if it, or what it uses of a test file, names

- an object of a private module that is not public and that no module here defines, or
- an attribute with one leading underscore that braintrace's sources define and ours do not, or
- the project file of braintrace.

`parity/internals.py` reads that off the sources of the tests. *Skipped* are tests that skip
themselves, and those that braintrace fails as well. The *share* is of tests passed and failed.
`make parity EXAMPLES=checkout` runs the examples of a checkout of braintrace in the same way.
"""


class Counts(dict[str, int]):
    """How many tests ended in which way."""

    @property
    def failed(self) -> int:
        """How many count against us."""
        return self.get('failed', 0) + self.get('crashed', 0)

    @property
    def share(self) -> float:
        """Passed, of those that count."""
        passed = self.get('passed', 0)
        return passed / max(passed + self.failed, 1)

    def cells(self, name: str) -> list[str]:
        """A row of the table."""
        whole = self.get('passed', 0) + self.failed
        numbers = [self.get('passed', 0), self.failed, self.get('skipped', 0)]
        share = f'{100 * self.share:.0f} %' if whole else ''
        return [name, *map(str, numbers), str(self.get('internal', 0)), share]


def count(found: Mapping[str, Outcome]) -> dict[str, Counts]:
    """By file, how its tests ended; under the empty name, all."""
    counts: dict[str, Counts] = defaultdict(Counts)
    for test, row in found.items():
        for name in ('', test.split('::')[0]):
            counts[name][row['outcome']] = counts[name].get(row['outcome'], 0) + 1
    return dict(sorted(counts.items()))


def as_table(counts: Mapping[str, Counts]) -> str:
    """The table of files, all together at the end."""
    rows = [row.cells(f'`{name}`') for name, row in counts.items() if name]
    rows = [list(HEADER), ['---'] * len(HEADER), *rows]
    if '' in counts:
        rows.append(counts[''].cells('all'))
    return '\n'.join(f'| {" | ".join(row)} |' for row in rows)


def _failing(found: Mapping[str, Outcome]) -> list[str]:
    return [test for test, row in found.items() if row['outcome'] in ('failed', 'crashed')]


def _reason(test: str, why: str) -> Reason | None:
    for reason in REASONS:
        if fnmatchcase(test.replace('[', '('), reason.tests.replace('[', '(')) and (
            reason.message in why
        ):
            return reason
    return None


def check_reasons(found: Mapping[str, Outcome], *, stale: bool = True) -> list[str]:
    """What is wrong with the table of reasons: a test without one, or one without a test."""
    used, faults = set(), []
    for test in _failing(found):
        reason = _reason(test, found[test]['why'])
        used.add(reason)
        if reason is None:
            faults.append(f'no reason: {test}: {found[test]["why"].splitlines()[:1]}')
    if stale:
        faults += [f'stale: {r.tests}: {r.text}' for r in REASONS if r not in used]
    return faults


def as_page(found: Mapping[str, Outcome], counts: Mapping[str, Counts]) -> str:
    """The page that the documentation keeps."""
    tests: dict[str, list[str]] = defaultdict(list)
    for test in _failing(found):
        reason = _reason(test, found[test]['why'])
        tests['No reason is given yet.' if reason is None else reason.text].append(test)
    parts = [PREAMBLE, as_table(counts), '', examples_section(), '## Tests that fail, and why', '']
    for text, names in sorted(tests.items(), key=lambda item: -len(item[1])):
        parts += [f'**{len(names)}.** {text}', '', *_lines(names), '']
    return '\n'.join(parts).rstrip() + '\n'


def _lines(tests: Sequence[str]) -> list[str]:
    return [f'- `{test.removeprefix("braintrace/")}`' for test in sorted(tests)]
