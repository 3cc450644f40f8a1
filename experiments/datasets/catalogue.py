"""Which data sets there are, where they are published, and the checksums that tell that they came whole.

Two kinds of checksum stand here. That of a `Source` is of the download as it is served, as its publishers (CIFAR-10,
Fashion-MNIST) or the public loaders of torchvision and TensorFlow Datasets give it. That of a file is the SHA-256 of
the file as it lies in the data folder, taken from files that agree with the published ones. None stands where none is
known; the size is all that is checked then.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.datasets.mrpc import split_mrpc

GLUE = "https://dl.fbaipublicfiles.com/glue/data/"
SENTEVAL = "https://dl.fbaipublicfiles.com/senteval/senteval_data/"
MINILM = "https://huggingface.co/sentence-transformers/paraphrase-MiniLM-L3-v2/resolve/main/"
FASHION = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)


@dataclass(frozen=True)
class Source:
    """One download: the addresses that it can be had from, and its checksum ("md5:..." or "sha256:...")."""

    name: str
    urls: tuple[str, ...]
    checksum: str | None
    size: int | None


@dataclass(frozen=True)
class DataSet:
    """What is downloaded, and which files come of it.

    Args:
        name: of `python -m experiments.datasets NAME`.
        title: what it is, in a line.
        sources: the downloads; tar.gz, zip and gz are unpacked, side by side in one folder.
        files: {path under the data folder: (path in the folder of what was unpacked, its SHA-256)}.
        assemble: makes files of others in the folder of what was unpacked, where the publishers leave that to users.
        instead: {one of the files: another file that does as well, where somebody has put it}.
    """

    name: str
    title: str
    sources: tuple[Source, ...]
    files: Mapping[str, tuple[str, str | None]]
    assemble: Callable[[Path], None] | None = None
    instead: Mapping[str, str] = field(default_factory=dict)


def data_set(name: str) -> DataSet:
    """The entry of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in CATALOGUE:
        close = [known for known in CATALOGUE if name and name in known] or difflib.get_close_matches(name, CATALOGUE)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"there is no data set {name!r}; {hint}there are {', '.join(CATALOGUE)}")
    return CATALOGUE[name]


def _idx(name: str, title: str, homes: tuple[str, ...], parts: dict[str, tuple[str, int, str]]) -> DataSet:
    """Four gzipped files; `parts`: {file: (MD5 of the .gz, its size, SHA-256 of the file)}."""
    sources = tuple(
        Source(f"{name}-{file}.gz", tuple(f"{home}{file}.gz" for home in homes), f"md5:{md5}", size)
        for file, (md5, size, _) in parts.items()
    )
    files = {f"{name}/{file}": (f"{name}-{file}", sha256) for file, (_, _, sha256) in parts.items()}
    return DataSet(name, title, sources, files)


def _glue(name: str, title: str, task: str, sha256: str, size: int, train: str, dev: str) -> DataSet:
    """A zip of one task; checksums of the zip, of train.tsv and of dev.tsv."""
    source = Source(f"{task}.zip", (f"{GLUE}{task}.zip",), f"sha256:{sha256}", size)
    files = {
        f"glue/{task}/train.tsv": (f"{task}/train.tsv", train),
        f"glue/{task}/dev.tsv": (f"{task}/dev.tsv", dev),
    }
    return DataSet(name, title, (source,), files)


def _cifar10(batches: dict[str, str]) -> DataSet:
    """Checksums of the six files, by their names."""
    home = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    source = Source("cifar-10-binary.tar.gz", (home,), "md5:c32a1d4ab5d03f1284b67883e8d87530", 170_052_171)
    paths = {f"cifar-10-batches-bin/{name}.bin": sha256 for name, sha256 in batches.items()}
    files = {path: (path, sha256) for path, sha256 in paths.items()}
    return DataSet("cifar10", "60,000 photographs of 10 classes, 32 x 32 pixels, binary version", (source,), files)


_ENTRIES = (
    _idx(
        "mnist",
        "70,000 handwritten digits, 28 x 28 pixels",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/",),
        {
            "train-images-idx3-ubyte": (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                9_912_422,
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            ),
            "train-labels-idx1-ubyte": (
                "d53e105ee54ea40749a09fcbcd1e9432",
                28_881,
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            ),
            "t10k-images-idx3-ubyte": (
                "9fb629c4189551a2d022fa330f9573f3",
                1_648_877,
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            ),
            "t10k-labels-idx1-ubyte": (
                "ec29112dd5afa0611ce80d1b7f02629c",
                4_542,
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
        },
    ),
    _idx(
        "fashion-mnist",
        "70,000 pieces of clothing, 28 x 28 pixels",
        FASHION,
        {
            "train-images-idx3-ubyte": (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                26_421_880,
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            ),
            "train-labels-idx1-ubyte": (
                "25c81989df183df01b3e8a0aad5dffbe",
                29_515,
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            ),
            "t10k-images-idx3-ubyte": (
                "bef4ecab320f06d8554ea6380940ec79",
                4_422_102,
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            ),
            "t10k-labels-idx1-ubyte": (
                "bb300cfdad3c16e7a12a480ee83cd310",
                5_148,
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
        },
    ),
    _cifar10(
        {
            "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        }
    ),
    DataSet(
        "glue-mrpc",
        "is one sentence a paraphrase of the other? 3,668 + 408 pairs (the Microsoft corpus, as SentEval has it)",
        (
            Source(
                "msr_paraphrase_train.txt",
                (f"{SENTEVAL}msr_paraphrase_train.txt",),
                "sha256:60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89",
                1_047_044,
            ),
            Source(
                "mrpc_dev_ids.tsv",
                (f"{GLUE}mrpc_dev_ids.tsv",),
                "sha256:971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7",
                6_222,
            ),
            Source(
                "msr_paraphrase_test.txt",
                (f"{SENTEVAL}msr_paraphrase_test.txt",),
                "sha256:a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784",
                441_275,
            ),
        ),
        {
            "glue/MRPC/train.tsv": (
                "train.tsv",
                "69abcedee3cf738c6ce58d772e43e1b7cdf5b4edee4aceda459c0d9f4e5599f3",
            ),
            "glue/MRPC/dev.tsv": ("dev.tsv", "9e8f284788040f7c9ecde2e1b3c07237c756f926bd9ef8548ef5d34b56f69f17"),
            "glue/MRPC/msr_paraphrase_test.txt": (
                "msr_paraphrase_test.txt",
                "a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784",
            ),
        },
        assemble=split_mrpc,
    ),
    _glue(
        "glue-stsb",
        "how alike are two sentences, from 0 to 5? 5,749 + 1,500 pairs",
        "STS-B",
        "e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85",
        802_872,
        "41c4d978b6162abdcada7e49a982211954cca5459c228db478af333124b257a2",
        "fe7dc0632a5033562f3cadff991f6e8d9b9b6311861660e78c3c82eb7db67f59",
    ),
    _glue(
        "glue-rte",
        "does one sentence follow from the other? 2,490 + 277 pairs",
        "RTE",
        "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee",
        697_150,
        "41e3a9b063433392343fad9e962cf2f58b681c78d8f71592f4186f0837246c5c",
        "80230dfa1347282e7b532b06a1004a76a710087541189bf874223ddf0e3819fb",
    ),
    _glue(
        "glue-sst2",
        "is a film review kind? 67,349 + 872 phrases",
        "SST-2",
        "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa",
        7_439_277,
        "48eac26399f8456935f81dd9e3a745c1430adb6c62e233ccfe22db4a0d15d1d1",
        "54a9c12c77e402fc14d6a66a506f24d999f596b0176eb777c972cccc2f9cc4b0",
    ),
    DataSet(
        "minilm-l3",
        "paraphrase-MiniLM-L3-v2, a small pretrained BERT, for the tasks of GLUE; its weights come without a checksum",
        (
            Source("minilm-l3-config.json", (f"{MINILM}config.json",), None, None),
            Source(
                "minilm-l3-vocab.txt",
                (f"{MINILM}vocab.txt",),
                "sha256:07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
                231_508,
            ),
            Source("minilm-l3-model.safetensors", (f"{MINILM}model.safetensors",), None, None),
        ),
        {
            "minilm-l3/config.json": ("minilm-l3-config.json", None),
            "minilm-l3/vocab.txt": (
                "minilm-l3-vocab.txt",
                "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
            ),
            "minilm-l3/model.safetensors": ("minilm-l3-model.safetensors", None),
        },
        instead={"minilm-l3/model.safetensors": "minilm-l3/paraphrase-MiniLM-L3-v2.fp16.npz"},
    ),
    DataSet(
        "resnet20",
        "the M-FAC authors' ResNet20 on CIFAR-10, 272,474 weights, 91.4 %",
        (
            Source(
                "mfac_resnet20_cifar10.pth.tar",
                ("https://github.com/IST-DASLab/M-FAC/raw/master/checkpoints/resnet20_cifar10.pth.tar",),
                "sha256:e08b9b71ee33c3abad25588ed63999501673c02f7809364e27d965399e58bf8b",
                2_220_302,
            ),
        ),
        {
            "checkpoints/mfac_resnet20_cifar10.pth.tar": (
                "mfac_resnet20_cifar10.pth.tar",
                "e08b9b71ee33c3abad25588ed63999501673c02f7809364e27d965399e58bf8b",
            )
        },
    ),
)
CATALOGUE: dict[str, DataSet] = {entry.name: entry for entry in _ENTRIES}
