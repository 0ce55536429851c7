"""The calls that users write: `wrap` and `unwrap`, `from_pretrained` and `from_loader`."""

from raymod.api.loading import from_loader, from_pretrained
from raymod.api.wrapping import unwrap, wrap

__all__ = ["from_loader", "from_pretrained", "unwrap", "wrap"]
