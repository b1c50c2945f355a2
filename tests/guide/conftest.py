"""What the tests of a page need beside what lies here."""

from __future__ import annotations

import sys
from pathlib import Path

for beside in ("server", "browser"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / beside))
