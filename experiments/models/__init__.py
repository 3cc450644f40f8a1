"""The networks of the paper, written plainly; `experiments.resnet` has the ResNets for 32 x 32 images."""
