"""MRPC as GLUE has it: the Microsoft corpus' training file, cut into train.tsv and dev.tsv by a published list."""

from pathlib import Path


def split_mrpc(folder: Path) -> None:
    """Writes train.tsv and dev.tsv beside `msr_paraphrase_train.txt` and `mrpc_dev_ids.tsv`.

    Lines are taken over byte for byte, each file under the header, the byte order mark included.
    """
    ids = {tuple(line.split()) for line in (folder / "mrpc_dev_ids.tsv").read_bytes().splitlines()}
    header, *lines = (folder / "msr_paraphrase_train.txt").read_bytes().splitlines()
    held = [tuple(line.split(b"\t")[1:3]) in ids for line in lines]
    for name, wanted in (("train.tsv", False), ("dev.tsv", True)):
        chosen = [line.strip() for line, is_held in zip(lines, held, strict=True) if is_held is wanted]
        (folder / name).write_bytes(b"\n".join([header, *chosen, b""]))
