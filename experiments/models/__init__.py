"""The networks of the paper, written plainly; `experiments.models.resnet` has the ResNets for 32 x 32 images."""
