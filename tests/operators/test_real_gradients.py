"""Gradients of real networks, answered in float32 first: four digits against float64, at any damping in use."""

import oracle
import pytest
import torch
from torch import nn

import mfac
from experiments.data import HALVES, cifar_batches
from experiments.datasets.folder import MissingData
from experiments.models.resnet import mfac_resnet20
from experiments.models.stories import stories_model, story_batches, story_pieces
from mfac.precision import FEW_ROWS

M = FEW_ROWS + 8  # with fewer rows the Gram matrix would be in float64
CROSS_ENTROPY = mfac.criterion_loss(nn.CrossEntropyLoss())


def resnet20():
    return mfac_resnet20(), CROSS_ENTROPY, cifar_batches(4, HALVES, seed=0)


def language_model():
    batches = story_batches(story_pieces("stories260K", "train", 256), 1)
    return stories_model("stories260K"), mfac.model_loss, batches


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
                                     intermediate_size=128, max_position_embeddings=32)  # fmt: skip
    batches = [{"input_ids": torch.randint(300, (4, 16)), "labels": torch.randint(2, (4,))} for _ in range(M + 1)]
    return transformers.BertForSequenceClassification(config), mfac.model_loss, batches


def just_initialised():
    model = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10))
    return model, CROSS_ENTROPY, [(torch.randn(16, 100), torch.randint(10, (16,))) for _ in range(M + 1)]


@pytest.fixture(scope="module", params=[resnet20, language_model, bert, just_initialised], ids=lambda f: f.__name__)
def rows(request):
    """The gradients of M batches, and of one more."""
    torch.manual_seed(0)
    try:
        model, loss_fn, batches = request.param()
    except MissingData as missing:
        pytest.skip(str(missing))
    grads = mfac.collect_gradients(model, loss_fn, batches, M + 1)
    return grads[:M], grads[M]


@pytest.mark.parametrize("damping", [1e-3, 1e-6])
def test_the_full_matrix_keeps_four_digits(rows, damping):
    G, other = rows
    wide, d = G.double(), G.shape[1]
    L = torch.linalg.cholesky(wide @ wide.T + M * damping * torch.eye(M, dtype=torch.float64))
    W = torch.linalg.solve_triangular(L, wide, upper=False)
    op, diagonal = mfac.StaticInverseFisher(G, damping), (1 - W.square().sum(0)) / damping
    assert ((op.diagonal() - diagonal) / diagonal).abs().max() < 1e-4
    for x in (torch.randn(d), other, G[3], (torch.randn(M, dtype=torch.float64) @ wide).float()):
        truth = (x.double() - W.T @ (W @ x.double())) / damping
        assert oracle.error(op @ x, oracle.wide(truth)) < 1e-4
        assert op.quadratic_form(x).item() == pytest.approx(float(x.double() @ truth), rel=1e-4)
    i, j = torch.randint(d, (2, 500))
    between = ((i == j).double() - (W[:, i] * W[:, j]).sum(0)) / damping
    assert ((op[i, j] - between).abs() < 1e-4 * (diagonal[i] * diagonal[j]).sqrt()).all()


@pytest.mark.parametrize("block_size", [M // 2, 2 * M], ids=["primal", "dual"])
@pytest.mark.parametrize("damping", [1e-3, 1e-6])
def test_blocks_keep_four_digits(rows, damping, block_size):
    G, other = (part[..., -50 * block_size :].contiguous() for part in rows)  # the last layers have larger gradients
    blocks = G.double().unflatten(1, (50, block_size)).transpose(0, 1)
    fisher = blocks.mT @ blocks / M + damping * torch.eye(block_size, dtype=torch.float64)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(fisher))
    op, diagonal = mfac.StaticInverseFisher(G, damping, block_size=block_size), inverse.diagonal(dim1=1, dim2=2)
    assert ((op.diagonal() - diagonal.flatten()) / diagonal.flatten()).abs().max() < 1e-4
    for x in (torch.randn(50 * block_size), other, G[3]):
        truth = (inverse @ x.double().view(50, block_size, 1)).flatten()
        assert oracle.error(op @ x, oracle.wide(truth)) < 1e-4
        assert op.quadratic_form(x).item() == pytest.approx(float(x.double() @ truth), rel=1e-4)
    i, j = torch.randint(block_size, (2, 50))
    first = torch.arange(50) * block_size
    found, between = op[first + i, first + j], inverse[range(50), i, j]
    assert ((found - between).abs() < 1e-4 * (diagonal[range(50), i] * diagonal[range(50), j]).sqrt()).all()
