"""verifiers imports environments by the name of their module, and this folder has one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
