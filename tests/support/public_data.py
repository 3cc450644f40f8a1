"""A mark for tests that need the public data."""

import pytest

from experiments.datasets.folder import data_folder

needs_data = pytest.mark.skipif(not data_folder().exists(), reason="no data under MFAC_DATA")
