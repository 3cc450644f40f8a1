"""What a user would pick instead of M-FAC, on the same matrices and models: rooms of bench_peers.py."""
