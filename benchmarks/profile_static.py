"""Where the time of a static set-up goes, by operation: `python benchmarks/profile_static.py [m]`."""

import sys

from torch.profiler import ProfilerActivity, profile

import mfac
from timing import unit_rows


def main():
    G = unit_rows(int(sys.argv[1]) if len(sys.argv) > 1 else 512, 270_000)
    mfac.StaticInverseFisher(G)
    with profile(activities=[ProfilerActivity.CPU]) as record:
        mfac.StaticInverseFisher(G)
    print(record.key_averages().table(sort_by="self_cpu_time_total", row_limit=6))


if __name__ == "__main__":
    main()
