"""The code of ``docs/migration.md`` runs."""

import pathlib
import re


def test_the_code_of_the_page_runs():
    page = pathlib.Path(__file__).parents[1] / 'docs' / 'migration.md'
    blocks = re.findall(r'```python\n(.*?)```', page.read_text(), re.DOTALL)
    assert len(blocks) == 3
    exec('\n'.join(blocks), {})
