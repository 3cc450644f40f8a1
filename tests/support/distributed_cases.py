"""Training on several ranks, for functions that the processes of `rank_pool` run; on one rank it is plain training."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from optimizers import mask_of, network
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from mfac import MFAC, FullMatrixAdam

BATCH = 12  # which two, three and four ranks can share
SETTINGS: dict[str, Any] = {"lr": 0.05, "num_grads": 8, "damping": 0.05}
CASES: dict[str, dict[str, Any]] = {
    "momentum_l2": {"momentum": 0.9, "weight_decay": 0.01},
    "masks": {"masked": True, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "decoupled_weight_decay": True},
    "clipped": {"max_step_norm": 0.05, "update_every": 2, "damping": lambda step: 0.05 if step < 20 else 0.08},
    "full_matrix": {"optimizer": FullMatrixAdam, "masked": True, "orthogonalize": True, "eps": 0.01},
}


def batch(step: int, group: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """This rank's share of the batch of a step."""
    inputs = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    share = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    return inputs[share], inputs[share, :3].argmax(1)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases in groups, each with a learning rate of its own."""
    named = list(model.named_parameters())
    return [
        {"params": [(name, tensor) for name, tensor in named if tensor.ndim > 1]},
        {"params": [(name, tensor) for name, tensor in named if tensor.ndim == 1], "lr": 0.02, "weight_decay": 0.0},
    ]


class Training:
    """A model, its optimizer, and the ranks that train them: way is "ddp" or "fsdp"; no group is one process."""

    def __init__(self, group, way, *, dtype=torch.float64, masked=False, optimizer=MFAC, **options):
        self.group, self.dtype = group, dtype
        # Layers of 7 and 3 outputs: chunks of them are uneven, and the fourth rank has nothing of the second.
        self.model = network().to(dtype)
        masks = {"0.weight": mask_of(self.model[0].weight)} if masked else None
        if masks:
            self.model[0].weight.data.mul_(masks["0.weight"])
        self.forward: nn.Module = self.model
        self.placed = way == "fsdp" and group is not None
        if self.placed:
            fully_shard(self.model, mesh=DeviceMesh.from_group(group, "cpu"))
        elif group is not None:
            self.forward = DistributedDataParallel(self.model, process_group=group)
            options = {"process_group": group} | options
        self.optimizer = optimizer(groups_of(self.model), **(SETTINGS | {"masks": masks} | options))

    def backward(self, step: int) -> None:
        inputs, targets = batch(step, self.group, self.dtype)
        self.optimizer.zero_grad()
        F.cross_entropy(self.forward(inputs), targets).backward()

    def steps(self, steps: range) -> "Training":
        for step in steps:
            self.backward(step)
            self.optimizer.step()
        return self

    def weights(self) -> list[Tensor]:
        """Whole, wherever the pieces are."""
        whole = [tensor.full_tensor() if self.placed else tensor for tensor in self.model.parameters()]
        return [tensor.detach().clone() for tensor in whole]

    @property
    def operator(self):
        return self.optimizer._window.operator


def save_state(training: Training, folder: Any) -> None:
    dcp.save(_state_of(training), checkpoint_id=folder, process_group=training.group, no_dist=training.group is None)


def load_state(training: Training, folder: Any) -> None:
    state, group = _state_of(training), training.group
    dcp.load(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(training.model, training.optimizer, **parts)


def _state_of(training: Training) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(training.model, training.optimizer), strict=True))


class Sent(TorchDispatchMode):
    """What is handed to collectives while it is active: (operation, numbers, bytes)."""

    def __init__(self):
        super().__init__()
        self.messages: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.overloadpacket.__name__
            # Of a gathering the second argument is what this rank gives.
            given = args[1] if "allgather" in name and "object" not in name else args[0]
            tensors = [t for t in torch.utils._pytree.tree_leaves(given) if isinstance(t, Tensor)]
            self.messages.append((name, sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)))
        return func(*args, **(kwargs or {}))
