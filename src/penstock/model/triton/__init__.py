"""The Triton back-end: layers and ends of a model on a CUDA GPU, computed by the kernels of `penstock.kernels.triton`."""
