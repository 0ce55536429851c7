"""What processes of one machine share: the limits on it, and files that have no name."""

from raymod.machine.cgroups import available_cores
from raymod.machine.nameless import TOKEN_BYTES, new_token, open_by_token, path_of

__all__ = ["TOKEN_BYTES", "available_cores", "new_token", "open_by_token", "path_of"]
