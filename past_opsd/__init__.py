"""PAST: privileged adaptation from complete student trajectories, for on-policy self-distillation."""

__version__ = "0.1.0"
