"""Check that this machine has what is needed, and say what to do where it has not.

Starts no engine and changes nothing. Exit code 0 unless something that is needed is missing or broken.
"""

from inferscale_mem.cli.doctor.command import add_arguments, run

__all__ = ["add_arguments", "run"]
