"""`kvtier demo`: chat sessions on a real model outgrow its GPU pool, and come back from host memory."""

from kvtier_engine.demo.command import command

__all__ = ["command"]
