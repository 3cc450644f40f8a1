"""Public data sets: where they come from, where they are kept, and how their files become tensors."""

from experiments.datasets.catalogue import CATALOGUE, DataSet, data_set
from experiments.datasets.download import ChecksumError, DownloadError
from experiments.datasets.fetching import fetch, missing_files
from experiments.datasets.folder import MissingData, data_folder
from experiments.datasets.images import load_cifar10, load_mnist
from experiments.datasets.sentences import load_glue
from experiments.datasets.unpacking import UnsafeArchive
from mfac.app.tasks.tensor_batches import TensorBatches

__all__ = [
    "CATALOGUE",
    "ChecksumError",
    "DataSet",
    "DownloadError",
    "MissingData",
    "TensorBatches",
    "UnsafeArchive",
    "data_folder",
    "data_set",
    "fetch",
    "load_cifar10",
    "load_glue",
    "load_mnist",
    "missing_files",
]
