"""What raymod costs, measured beside the alternatives: `raymod bench`.

- `run.run_bench` measures, part by part: `calls`, `step`, `startup`, `memory`.
- `figures.rows` holds what was measured against the figures to reach.
- `pipeline.bench_pipeline` times a pipeline of the user's.

What raymod is compared with, each only where it is there: `peer`, cache-dit's Ray wrapper of a
transformer; `spmd`, the same split module in plain torch.distributed processes; `local`, the module
in this process; `floor`, a memcpy of the payload in and out and one wake-up of another process and
back. Importing this package is cheap.
"""

from __future__ import annotations

__all__ = ["PARTS"]

PARTS = ("calls", "step", "startup", "memory")
