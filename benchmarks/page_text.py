"""Figures as text for the page: tables, times, sizes, and what they were measured on."""


def table(heads, rows):
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join(["---"] * len(heads)) + " |"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def seconds(value):
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def size(count):
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def measured_on(record):
    env = record["environment"]
    return (
        f"`{record['command']}`, {env['date']}: {env['processor']}, {env['threads']} threads, {env['memory_gib']} GiB, "
        f"torch {env['torch']}, Python {env['python']}."
    )
