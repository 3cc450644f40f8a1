"""Public data sets: where they come from, where they are kept, and how their files become tensors."""

from mfac.datasets.catalogue import CATALOGUE, DataSet, data_set
from mfac.datasets.download import ChecksumError, DownloadError
from mfac.datasets.fetching import fetch, missing_files
from mfac.datasets.folder import MissingData, data_folder
from mfac.datasets.images import load_cifar10, load_mnist
from mfac.datasets.sentences import load_glue
from mfac.datasets.tensor_batches import TensorBatches
from mfac.datasets.unpacking import UnsafeArchive

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
