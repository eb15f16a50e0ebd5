"""SkyRL's clients import torch for annotations only, and no small build of it has Python 3.12."""

from __future__ import annotations

import sys
from unittest.mock import MagicMock

sys.modules.setdefault("torch", MagicMock())
