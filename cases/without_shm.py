"""Run `gradtrace` with DeepSpeed's shared-memory operator switched off: nothing to compile."""

import sys

import deepspeed.ops

from gradtrace.cli.main import main

if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    sys.argv[0] = "gradtrace"
    main()
