"""The stub that stands in for a module, and what each of its inherited methods does."""

from raymod.module.stub import RanksProtocol, RemoteModule, make_stub, restore_local

__all__ = ["RanksProtocol", "RemoteModule", "make_stub", "restore_local"]
