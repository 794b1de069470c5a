"""Register the larger hypothesis profile: ``pytest --hypothesis-profile=deep tests/analysis``."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("deep", deadline=None, print_blob=True)
