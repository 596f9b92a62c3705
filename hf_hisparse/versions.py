"""Numbers for the memory that state lives in: a captured graph is good as long as they stay the same."""

from __future__ import annotations

import itertools

new_version = itertools.count(1).__next__
