"""The only package that issues collectives or creates CUDA streams."""
