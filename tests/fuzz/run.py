"""Many programs in a row, within a time."""

import datetime
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.check import Vacuous, clear, failures
from tests.fuzz.programs import FEATURES, program

__all__ = ['Result', 'run', 'todays_seed']


@dataclass
class Result:
    """How many programs were run, and those that failed, each with what is wrong, as text."""

    first: int
    programs: int = 0
    vacuous: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        last = self.first + self.programs - 1
        return (
            f'{self.programs} programs (seeds {self.first} to {last}) in {self.seconds:.0f} s: '
            f'{len(self.failures)} failed, {self.vacuous} proved nothing.'
        )


def todays_seed() -> int:
    """The first seed of a day; days are far enough apart for their seeds not to meet."""
    return datetime.date.today().toordinal() * 100_000


def run(
    first: int,
    seconds: float,
    folder: Path,
    count: int | None = None,
    features: Collection[str] = FEATURES,
    report: Callable[[str], object] = lambda line: None,
) -> Result:
    """Run programs from a seed on, until the time is over or so many were run."""
    result, begin = Result(first), time.monotonic()
    while time.monotonic() - begin < seconds and result.programs != count:
        seed = first + result.programs
        text, path = program(seed, features), folder / f'program_{seed}.py'
        path.write_text(text)
        outcome = 'ok'
        try:
            wrong = '\n\n'.join(failures(str(path)))
        except Vacuous as reason:
            result.vacuous += 1
            wrong, outcome = '', f'proves nothing: {reason}'
        except Exception:  # of the program itself, or of the oracle
            wrong = traceback.format_exc()
        if wrong:
            result.failures.append(f'Seed {seed}\n\n{wrong}\n\n{text}')
            outcome = f'FAILED, see {path}'
        else:
            path.unlink()
        result.programs += 1
        result.seconds = time.monotonic() - begin
        report(f'{result.seconds:6.0f} s  seed {seed}  {outcome}')
        if result.programs % 10 == 0:
            clear()
    return result
