"""MFAC with fully_shard (FSDP2): parameters, gradients, momentum and window, all in parts; a step sends m numbers.

    torchrun --nproc-per-node 2 examples/train_fsdp2.py
    torchrun --nproc-per-node 2 --max-restarts 1 examples/train_fsdp2.py --die-at 2    # one is killed, the run is not

Started again in the same folder it goes on from the last checkpoint, on any number of processes. Digits, with the
settings of train_plain.py, which explains them.
"""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from digits import accuracy, build_model, load_data
from elastic import die_once, join, leave, load_latest, save, shares
from mfac import MFAC
from train_ddp import parse


def whole_weights(model):
    """The weights in one place, for whoever wants to test or ship the model."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def main(argv=None):
    args = parse(argv)
    join()
    train, test = load_data()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build_model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # No process_group: the parameters are DTensors, and know their mesh.
    optimizer = MFAC(
        model.named_parameters(), lr=1.0, num_grads=args.num_grads, damping=0.1, normalize="sum", momentum=0.9
    )
    for epoch in range(load_latest(args.folder, model, optimizer), args.epochs):
        die_once(args.die_at, epoch)
        for images, labels in shares(train.tensors, epoch):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save(args.folder, epoch + 1, model, optimizer)
        figures = optimizer.diagnostics()  # a sum over the processes, so all of them ask
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}, cosine {figures['cosine']:.2f}", flush=True)
    weights = whole_weights(model)
    if dist.get_rank() == 0:
        torch.save(weights, args.folder / "final.pt")
        plain = build_model()
        plain.load_state_dict(weights)
        print(f"accuracy {accuracy(plain, test):.1f} %")
    leave()


if __name__ == "__main__":
    main()
