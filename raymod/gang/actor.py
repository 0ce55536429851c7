"""The actor of one rank, a thin shell around `Worker`.

Ray gets this class by value: it must run before raymod, torch or anything else is imported on the
rank, so that the environment is set when they are, and so that a missing package is reported as
what it is. It therefore uses nothing of this module but itself.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["RankActor", "by_value"]


class RankActor:
    """Runs in the rank's process. `answer` is the way in; `health` has a thread of its own."""

    def __init__(self) -> None:
        self.worker: Any = None
        self.broken: Exception | None = None

    def place(
        self, environ: dict[str, str], overwrite: bool, paths: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Adopt the driver's variables and paths, and say where this process is."""
        import os
        import sys

        import ray

        sys.path += [path for path in paths if path not in sys.path and os.path.exists(path)]

        for name, value in environ.items():
            if overwrite or name not in os.environ:
                os.environ[name] = value
        # warnings of torch's C++ side reach the driver's terminal otherwise, once a rank
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        context = ray.get_runtime_context()
        try:
            host = os.readlink("/proc/self/ns/pid")
            with open("/proc/sys/kernel/random/boot_id") as file:
                host += file.read().strip()
        except OSError:
            host = ""
        return {
            "node_id": context.get_node_id(),
            "gpu_ids": tuple(context.get_accelerator_ids().get("GPU", ())),
            "pid": os.getpid(),
            "host": host,
        }

    def warm(self) -> None:
        """Import what every rank needs, before it is asked for anything."""
        import gc

        # Imports make objects that stay; looking for garbage among them took an eighth of the time.
        gc.disable()
        try:
            import raymod.worker  # noqa: F401
        except Exception as error:  # `build` tells; importing torch a second time would not
            self.broken = error

    def build(self, seat: bytes, imports: Any) -> dict[str, Any]:
        """Make the worker; importing what it needs takes most of a rank's start.

        Args:
            seat: What `Worker` is made with, pickled.
            imports: Modules that the user's module is made of, imported while the driver lays out
                the weights.

        Returns:
            The worker's `RankInfo` as "info", or what stood in the way.
        """
        import gc
        import pickle

        try:
            if self.broken is not None:
                raise self.broken
            from raymod.worker import Worker
            from raymod.worker.host import quiet
            from raymod.worker.imports import import_all

            self.worker = Worker(**pickle.loads(seat))
            quiet(self.worker.rank)
            import_all(imports)
            return {"info": self.worker.hello()}
        except Exception as error:
            import traceback

            return {
                "type_name": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
                "is_import": isinstance(error, ImportError),
                "module": getattr(error, "name", None),
            }
        finally:
            gc.freeze()
            gc.enable()

    def answer(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See `Worker.answer`."""
        return self.worker.answer(method, *args, **kwargs)

    def forward(self, parcel: Any) -> Any:
        """See `Worker.forward`."""
        return self.worker.forward(parcel)

    def run(self, parcel: Any, replies: bool) -> Any:
        """See `Worker.run`."""
        return self.worker.run(parcel, replies=replies)

    def serve(self, ticket: Any) -> str:
        """See `raymod.worker.serving.serve`."""
        from raymod.worker.serving import serve

        return serve(self.worker, ticket)

    def health(self) -> Any:
        """See `Worker.health`."""
        return self.worker.health()


def by_value() -> type[RankActor]:
    """The class, set to travel as code and not as a name to import."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return RankActor
