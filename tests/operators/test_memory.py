"""Large memory is asked for in large pages, small memory is not, and both hold what is written to them."""

import sys
from pathlib import Path

import pytest
import torch

import mfac
from mfac import memory

CPU = torch.device("cpu")
SMAPS = Path("/proc/self/smaps")


def flags_at(address: int) -> list[str]:
    """What the system was told about the memory there."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            start, stop = (int(end, 16) for end in first.split("-"))
            inside = start <= address < stop
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"no memory at {address:#x}")


def middle(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() + tensor.nbytes // 2


needs_pages = pytest.mark.skipif(
    sys.platform != "linux" or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="the system has no large pages to ask for",
)


@needs_pages
def test_large_memory_is_in_large_pages():
    assert "hg" in flags_at(middle(memory.empty(1 << 24, dtype=torch.uint8, device=CPU)))
    window = mfac.DynamicInverseFisher(16, 1 << 18, 1e-3)
    assert "hg" in flags_at(middle(window.rows))


def test_small_memory_is_left_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(memory, "_madvise", lambda: lambda first, length, _: asked.append((first.value, length.value)))
    memory.empty(memory.LARGE_PAGE - 1, dtype=torch.uint8, device=CPU)
    assert asked == []
    held = memory.empty(4 * memory.LARGE_PAGE, dtype=torch.uint8, device=CPU)
    [(first, length)] = asked
    assert first % memory.LARGE_PAGE == length % memory.LARGE_PAGE == 0
    assert held.data_ptr() <= first < first + length <= held.data_ptr() + held.nbytes


@pytest.mark.parametrize("count", [0, 1, memory.LARGE_PAGE - 1, memory.LARGE_PAGE, 3 * memory.LARGE_PAGE + 5])
def test_zeros_of_any_size(count):
    held = memory.zeros(count, dtype=torch.uint8, device=CPU)
    assert held.shape == (count,)
    assert not held.any()
    held.fill_(7)
    assert bool((held == 7).all())


def test_without_the_system_call_it_is_plain_memory(monkeypatch):
    monkeypatch.setattr(memory, "_madvise", lambda: None)
    assert memory.zeros(2, 1 << 21, dtype=torch.float64, device=CPU).sum() == 0


def test_other_devices_are_left_alone():
    assert memory.empty(4, 1 << 20, dtype=torch.float32, device=torch.device("meta")).shape == (4, 1 << 20)
