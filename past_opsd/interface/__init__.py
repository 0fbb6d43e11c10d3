"""The ways in: the command line and TRL's scripts."""
