"""Files of any kind: written whole or not at all, with a stated durability.

Nothing here knows of images, kernels or GPUs, and everything else may import it.
"""
