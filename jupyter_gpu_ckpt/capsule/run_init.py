"""Runs `start.main`; a script of its own, because Python keeps the compiled code of modules, and not of scripts."""

import gc
import os
import sys

gc.disable()  # until `start.main`: what is imported stays, and a wake need not wait while it is looked through
sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from jupyter_gpu_ckpt.capsule.start import main  # noqa: E402 - found by the line before

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
