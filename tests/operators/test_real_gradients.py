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


@pytest.mark.parametrize("block_size", [None, M // 2, 2 * M], ids=["full", "primal", "dual"])
@pytest.mark.parametrize("damping", [1e-3, 1e-6])
def test_answers_keep_four_digits(rows, damping, block_size):
    G, other = rows
    if block_size is not None:  # the last layers have larger gradients
        G, other = (part[..., -50 * block_size :].contiguous() for part in rows)
    blocks = G.double().unflatten(1, (-1, block_size or G.shape[1])).transpose(0, 1)
    L = torch.linalg.cholesky(blocks @ blocks.mT + M * damping * torch.eye(M, dtype=torch.float64))
    W = torch.linalg.solve_triangular(L, blocks, upper=False)
    op, diagonal = mfac.StaticInverseFisher(G, damping, block_size=block_size), (1 - W.square().sum(1)) / damping
    assert ((op.diagonal() - diagonal.flatten()) / diagonal.flatten()).abs().max() < 1e-4
    for x in (torch.randn(len(other)), other, G[3], (torch.randn(M, dtype=torch.float64) @ G.double()).float()):
        y = x.double().view(len(W), -1, 1)
        truth = ((y - W.mT @ (W @ y)) / damping).flatten()
        assert oracle.error(op @ x, oracle.wide(truth)) < 1e-4
        assert op.quadratic_form(x).item() == pytest.approx(float(x.double() @ truth), rel=1e-4)
    block, (i, j) = torch.arange(500) % len(W), torch.randint(W.shape[2], (2, 500))
    found = op[block * W.shape[2] + i, block * W.shape[2] + j]
    between = ((i == j).double() - (W[block, :, i] * W[block, :, j]).sum(1)) / damping
    assert ((found - between).abs() < 1e-4 * (diagonal[block, i] * diagonal[block, j]).sqrt()).all()
