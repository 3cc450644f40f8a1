"""Figures as text for the page: tables, times, sizes, and what they were measured on."""


def table(heads, rows):
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join(["---"] * len(heads)) + " |"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def seconds(value):
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def size(count):
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def measured_on(record):
    env = record["environment"]
    threads = f"{env['threads']} thread{'s' * (env['threads'] != 1)}"
    return (
        f"`{record['command']}`, {env['date']}: {env['processor']}, {threads}, "
        f"{env['memory_gib']} GiB, torch {env['torch']}, Python {env['python']}."
    )
