"""``python -m jupyter_gpu_ckpt`` is ``jupyter gpu-ckpt``."""

import sys

from .cli import main

sys.exit(main())
