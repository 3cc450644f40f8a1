"""How the rows of a window are stored: plain dtypes, int8 with scales, or the largest entries with error feedback."""
