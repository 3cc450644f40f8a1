"""For tests of compiled code: they need a compiler."""

import shutil

import pytest

from mfac.windows import native

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, native.COMPILERS)), reason="there is no C compiler on this machine"
)
