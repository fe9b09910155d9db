"""docs/tensor.md: its table of functions is that of the code, its first program is the README's."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tensor.md"


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="the table has the functions of NumPy 2.1")
def test_the_table_of_functions_is_up_to_date():
    spec = importlib.util.spec_from_file_location("write_arrays", ROOT / "docs" / "write_arrays.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = PAGE.read_text()
    new = set(re.findall(r"`(\w+)`", module.function_table())) - set(dir(np)) - set(dir(np.linalg)) - set(dir(np.fft))
    assert new <= {"np"}
    assert module.written(text) == text, "run `python docs/write_arrays.py`"


def test_the_first_program_is_the_one_that_the_readme_shows_and_runs():
    program, output = re.search(
        r"~~~python\n(# arrays\.py\n.*?)~~~\n\n(```console\n.*?```)", PAGE.read_text(), re.DOTALL
    ).groups()
    readme = (ROOT / "README.md").read_text()
    assert f"```python\n{program}```" in readme
    assert output in readme


def test_every_public_name_is_on_the_page_of_the_api():
    import meshdist.tensor

    api = (ROOT / "docs" / "api" / "arrays.md").read_text()
    listed = set(re.findall(r"^\.\. auto\w+:: meshdist\.tensor\.(\w+)$", api, re.MULTILINE))
    assert listed == set(meshdist.tensor.__all__) - {"Placement"}


def test_every_public_name_of_gradients_is_on_the_page_of_the_api():
    import meshdist.autograd

    api = (ROOT / "docs" / "api" / "gradients.md").read_text()
    listed = set(re.findall(r"^\.\. autofunction:: meshdist\.autograd\.(\w+)$", api, re.MULTILINE))
    assert listed == set(meshdist.autograd.__all__)
