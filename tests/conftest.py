"""For all tests: one thread of torch. Several on a busy machine wait for one another and make tiny models very slow."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
