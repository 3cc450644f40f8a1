"""Public data sets: where they come from, where they are kept, and how their files become tensors."""

from mfac.app.datasets.catalogue import CATALOGUE, DataSet, data_set
from mfac.app.datasets.download import ChecksumError, DownloadError
from mfac.app.datasets.fetching import fetch, missing_files
from mfac.app.datasets.folder import MissingData, data_folder
from mfac.app.datasets.images import load_cifar10, load_mnist
from mfac.app.datasets.sentences import load_glue
from mfac.app.datasets.tensor_batches import TensorBatches
from mfac.app.datasets.unpacking import UnsafeArchive

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
