"""Random layouts are those of the tests of arrays, which lie beside these."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tensor"))
