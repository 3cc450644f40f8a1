"""Optimizers that the paper compares with, small and plain; SGD, Adam and AdamW are torch's, AdaHessian a library's."""
